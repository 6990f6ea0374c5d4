"""Programs with more to them than layers: bit by bit those of eager under ``aot_eager``, budgets held."""

from __future__ import annotations

import pytest
import torch
from programs import Program, run
from torch import nn
from torch.nn import functional


class Autocast(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.half(self.half(x, 0), 3)
        return x.float().square().mean()


class Buffers(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.half(x, 0)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.half(x + self.mean, 3).square().mean()


class InPlace(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 2 * self.half(x, 0)
        y[0] = 1.0
        return self.half(y.relu_(), 3).square().mean()


class LowRank(Program):
    """Frozen layers with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(4, 32) / 6 for _ in range(6))
        self.up = nn.ParameterList(torch.randn(32, 4) / 6 for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = functional.gelu(layer(x) + x @ down.t() @ up.t())
        return x.square().mean()


class Attends(Program):
    """Attention without dropout, whose operation PyTorch counts as random."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(4, 128, 32)
        for layer in self.layers:
            h = layer(x).unflatten(-1, (2, 16)).transpose(1, 2)
            x = functional.scaled_dot_product_attention(h, h, h, is_causal=True).transpose(1, 2).flatten(2)
        return x.square().mean()


@pytest.mark.parametrize("kind", [Autocast, Buffers, InPlace, LowRank])
def test_bit_by_bit_and_within_the_smallest_budget(kind: type[Program]) -> None:
    handle, _ = run(kind, "min")
    assert handle.plan.replayed


def test_attention_without_dropout_is_recomputed() -> None:
    handle, _ = run(Attends, "min")
    assert any("attention" in step.name and step.replayed for step in handle.plan.program)
