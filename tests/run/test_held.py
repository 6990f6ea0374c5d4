"""`limit_memory`: callers that hold outputs beside the loss, and with them what autograd saved on the way to
those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_model import needs_meter
from torch import nn

import lowtide
from lowtide import BudgetError
from lowtide.meter import measure, resident_bytes
from lowtide.plan.simulate import plain
from lowtide.run.limit.handle import Handle


class Counted(torch.autograd.Function):
    """A function of the user's own, which keeps what it was given where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.own = x.sin()
        return x.cos()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -gradients[0] * ctx.own


class Aside(nn.Module):
    """A loss, and a small output with a long history of its own."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor] = torch.sin) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.way = way

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = first = (x @ self.weight) * 2
        for _ in range(4):
            kept = self.way(kept)
        kept = kept[:1].sum(0)
        whole = first.exp()
        del first
        a = whole
        for _ in range(4):
            a = (a @ self.weight).tanh()
        return {"loss": (a * whole).sum(), "kept": kept}


def peaks(
    model: nn.Module, x: torch.Tensor, hold: Callable[[dict[str, torch.Tensor]], Any], steps: int = 3
) -> list[int]:
    """What each of some steps takes whose caller holds what ``hold`` makes of the outputs until backward has
    ended.
    """
    found = []
    for _ in range(steps):

        def step() -> None:
            outputs = model(x)
            loss, held = outputs["loss"], hold(outputs)
            del outputs
            loss.backward()
            del held

        found.append(resident_bytes(model) + x.nbytes + measure(step).peak_bytes)
        model.zero_grad(set_to_none=True)
    return found


def limited(model: nn.Module, x: torch.Tensor, share: float) -> Handle:
    """A limit at a share of the plain step's peak when its caller holds nothing."""
    graph = lowtide.trace(lambda: model(x), model=model, costs=False)
    return lowtide.limit_memory(model, int(plain(graph).peak_bytes * share))


@needs_meter
@pytest.mark.parametrize(
    "hold", [dict, lambda outputs: outputs["kept"].sum()], ids=["the outputs", "what is made of one"]
)
def test_a_held_output_holds_its_history(hold: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    torch.manual_seed(0)
    model, x = Aside(), torch.randn(512, 64)
    handle = limited(model, x, 0.85)
    found = peaks(model, x, hold)
    plan = handle.plan
    assert plan is not None and plan.budget_bytes is not None
    assert max(found[1:]) <= plan.budget_bytes
    assert found[1] == found[2] and abs(plan.predicted_peak_bytes - found[2]) <= 256, (
        "the output itself may be gone"
    )
    assert max(peaks(model, x, lambda _: None)) <= plan.budget_bytes


@needs_meter
def test_a_history_that_is_let_go_is_not_counted() -> None:
    torch.manual_seed(0)
    model, x = Aside(), torch.randn(512, 64)
    handle = limited(model, x, 0.85)
    found = peaks(model, x, lambda _: None)
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    assert (
        max(found[1:]) <= handle.plan.budget_bytes and abs(found[2] - handle.plan.predicted_peak_bytes) <= 256
    )


@needs_meter
def test_a_held_history_that_cannot_be_evicted_is_refused_with_the_least_that_holds_it() -> None:
    torch.manual_seed(0)
    model, x = Aside(Counted.apply), torch.randn(512, 64)
    handle = limited(model, x, 0.9)
    assert max(peaks(model, x, lambda _: None)[1:]) <= handle.plan.budget_bytes
    handle.remove()
    lowtide.limit_memory(model, handle.plan.budget_bytes)
    with pytest.raises(BudgetError) as caught:
        peaks(model, x, dict)
    model.zero_grad(set_to_none=True)
    handle = lowtide.limit_memory(model, caught.value.smallest_bytes)
    found = peaks(model, x, dict, steps=3)
    assert (
        max(found[1:]) <= handle.plan.budget_bytes and abs(found[2] - handle.plan.predicted_peak_bytes) <= 256
    )
