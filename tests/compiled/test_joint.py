"""A joint graph says what its calls read, write and compute."""

from __future__ import annotations

import torch
from joint_graphs import ROWS, look_at
from torch import nn

from lowtide.compiled.joint import lazily


class Words(nn.Module):
    """A cross entropy over many words, in float32, of logits in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 2048, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x).float(), targets)


def test_what_a_backward_computes_within_its_readers_takes_no_memory() -> None:
    x = torch.randn(ROWS, 16, dtype=torch.bfloat16, requires_grad=True)
    found = look_at(Words(), x, torch.randint(2048, (ROWS,)))
    joint, (_, backward) = found.joint, found.memory
    writes = [joint.bytes[key] for call in joint.calls if not call.forward for key in call.writes]
    assert max(writes) == 2 * ROWS * 2048  # the logits' gradient, and not its float32 before it
    assert backward.peak_bytes < 3 * 2 * ROWS * 2048


def test_what_is_needed_comes_right_before_who_needs_it() -> None:
    needs = {"loss": ["b"], "b": ["a"], "c": ["a"], "a": []}
    place = ["a", "b", "c", "loss"].index
    assert lazily(["c", "loss"], needs.__getitem__, place) == ["a", "c", "b", "loss"]
    assert lazily(["loss", "a"], needs.__getitem__, place) == ["a", "b", "loss"]
