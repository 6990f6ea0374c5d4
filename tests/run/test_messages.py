"""What is said of limited models: of a model's own checkpointing, and in one line; how often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compare import Limit, check
from loops import mlp, said_by, step
from small_model import batch, small
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.budget import format_bytes


class Checkpointed(nn.Module):
    """A stack that checkpoints its blocks by itself, as ``gradient_checkpointing=True`` makes models do."""

    def __init__(self, reentrant: bool, blocks: int = 4) -> None:
        super().__init__()
        self.reentrant, self.on = reentrant, True
        self.blocks = nn.ModuleList(mlp(64, 16, 16) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.on else block(x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_the_models_own_is_told_once(reentrant: bool) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        torch.manual_seed(0)
        model = limit(Checkpointed(reentrant))
        for number in range(3):
            model.zero_grad()
            step(model, number)
            yield model

    run = check(pattern, "100%")
    assert len([message for message in run.messages if "calls torch.utils.checkpoint" in message]) == 1


def test_a_budget_that_checkpointing_stands_in_the_way_of_says_so() -> None:
    torch.manual_seed(0)
    model = Checkpointed(reentrant=False)
    lowtide.limit_memory(model, "45%")  # less than parameters and gradients: nothing holds it
    with (
        pytest.warns(lowtide.LowtideWarning, match="calls torch.utils.checkpoint"),
        pytest.raises(lowtide.BudgetError) as caught,
    ):
        step(model)
    assert "gradient checkpointing off" in caught.value.remedies[0]
    model.on = False
    model.zero_grad()
    handle = lowtide.limit_memory(model, "100%")
    _, said = said_by(lambda: [step(model, number) for number in range(3)])
    assert handle.plan is not None and not [
        one for one in said if "calls torch.utils.checkpoint" in str(one.message)
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": "90%"}, "budget 90%"),
        ({"budget": 600 << 20}, "budget 600 MiB"),
        ({"policy": "full"}, "no budget"),
    ],
)
def test_a_handle_says_in_one_line_what_it_limits(options: dict[str, Any], says: str) -> None:
    model = small()
    handle = lowtide.limit_memory(model, **options)
    assert repr(handle) == f"<lowtide.Handle of Small: {says}, nothing planned yet>"
    handle.prepare(batch())
    plan = handle.prepare(batch(rows=150))
    peak = format_bytes(plan.predicted_peak_bytes)
    assert (
        repr(handle)
        == f"<lowtide.Handle of Small: {says}, 2 kinds of steps planned, latest predicted peak {peak}>"
    )
