"""Callers that hold outputs beside the loss, and losses outside the model: what they keep is in the plan."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_model import needs_meter
from torch import nn

import lowtide
from lowtide import BudgetError
from lowtide.meter import measure, peak, resident_bytes
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


Outputs = tuple[torch.Tensor, list[torch.Tensor]]
Found = tuple[list[list[torch.Tensor]], list[int], Any]


class Maps(nn.Module):
    """Attention that returns its maps, or other layers' results, besides what comes out at the end."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.shared = shared

    def forward(self, x: torch.Tensor) -> Outputs:
        beside = []
        for layer in self.layers:
            if self.shared:
                beside.append(x)
            y, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
            x = x + y
            if not self.shared:
                beside.append(weights)
        return x, beside


class Residual(nn.Module):
    """Its output's gradient goes past every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> Outputs:
        for layer in self.layers:
            x = x + layer(x)
        return x, []


def all_of_them(outputs: Outputs) -> torch.Tensor:
    return outputs[0].square().mean() + sum((w * (w.abs() + 1e-9).log()).sum() for w in outputs[1]) * 1e-3


def last(outputs: Outputs) -> torch.Tensor:
    return outputs[0].square().mean()


def a_sum(outputs: Outputs) -> torch.Tensor:
    return outputs[0].sum()


def only_maps(outputs: Outputs) -> torch.Tensor:
    return outputs[1][0].square().sum()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Outputs], torch.Tensor]]] = {
    "maps": (Maps, all_of_them),
    "maps that the caller holds": (Maps, all_of_them),
    "maps that the loss does not look at": (Maps, last),
    "one map alone": (Maps, only_maps),
    "hidden states": (lambda: Maps(shared=True), all_of_them),
    "hidden states that the loss does not look at": (lambda: Maps(shared=True), last),
    "a residual": (Residual, last),
    "a sum": (Residual, a_sum),
}

WITHIN_ONLY = ("maps that the loss does not look at", "one map alone")
"""Cases whose outputs the caller lets go of at moments that no plan knows: steps stay within the budget, but
may take less than predicted, or more.
"""


def steps(
    make: Callable[[], nn.Module],
    loss_of: Callable[[Outputs], torch.Tensor],
    budget: int | str | None,
    holds: bool = False,
) -> Found:
    torch.manual_seed(0)
    model = make()
    handle = lowtide.limit_memory(model, budget) if budget is not None else None
    x, found, peaks = torch.randn(4, 64, 32), [], []
    for step in range(4):
        model.zero_grad()
        gc.collect()
        torch.manual_seed(step)
        resident = resident_bytes(model) + x.nbytes
        with peak("cpu") as seen:
            outputs: Any = model(x)
            loss = loss_of(outputs)
            if not holds:
                del outputs
            loss.backward()
            outputs = None
        peaks.append(resident + seen.peak_bytes)
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        del loss
    return found, peaks, handle


@needs_meter
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("budget", ["70%", "smallest"])
def test_what_a_loss_outside_leaves_is_predicted(case: str, budget: str | int) -> None:
    make, loss_of = CASES[case]
    holds = case == "maps that the caller holds"
    wanted, _, _ = steps(make, loss_of, None)
    if budget == "smallest":
        with pytest.raises(lowtide.BudgetError) as caught:
            steps(make, loss_of, 101, holds)
        assert caught.value.smallest_bytes is not None
        budget = caught.value.smallest_bytes
    found, peaks, handle = steps(make, loss_of, budget, holds)
    for one, other in zip(wanted, found, strict=True):
        assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert handle is not None and handle.plan is not None and handle.plan.budget_bytes is not None
    assert max(peaks[1:]) <= handle.plan.budget_bytes
    if case not in WITHIN_ONLY:
        assert abs(peaks[-1] - handle.plan.predicted_peak_bytes) <= 64
