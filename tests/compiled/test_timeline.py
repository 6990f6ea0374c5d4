"""What the first compiled step takes besides itself: its calls are timed in the budget's own room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.meter import peak, resident_bytes
from lowtide.trace.costs import roofline

_UNSEEN = 1 << 20
"""Bytes that timing takes in any case: made-up numbers, the least buffer, scratch of single calls."""


class Model(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("budget", [5_000_000, "60%", "min"])
def test_the_first_step_is_timed_in_the_budgets_own_room(budget: Any) -> None:
    """A copy of 64 MiB was made to see how fast the machine moves bytes, and as much was held of outputs."""
    roofline._calibrate.cache_clear()
    layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model, x = Model(*layers), torch.randn(2048, 64)
    compiled = lowtide.compile(model, budget, backend="aot_eager")
    resident = resident_bytes(model) + x.nbytes
    with peak("cpu") as seen:
        compiled(x).backward()
    plan = lowtide.handle_of(compiled).plan
    assert plan is not None and seen.peak_bytes + resident <= plan.budget_bytes + _UNSEEN
