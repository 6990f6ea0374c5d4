"""`limit_memory`: models that take another way on fake tensors than on real ones, so that their first step goes astray from its trace."""

from __future__ import annotations

import warnings

import pytest
import torch
from small_model import needs_meter
from torch import nn

import lowtide
from lowtide import LowtideWarning
from lowtide.meter import measure, resident_bytes


class Otherwise(nn.Module):
    """Layers; on plain tensors some operations more, of which the largest makes as many copies of its input."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.copies = copies

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            side = x * 2
            if type(side) is torch.Tensor:
                side = torch.stack([side.detach()] * self.copies).amax(0)
            x = x + torch.tanh(layer(x)) * side.sigmoid()
        return {"loss": x.square().mean()}


def peaks(model: nn.Module, x: torch.Tensor, steps: int) -> list[int]:
    """What each of some steps takes, with whatever is traced before it."""
    found = []
    for _ in range(steps):
        standing = resident_bytes(model) + x.nbytes
        found.append(standing + measure(lambda: model(x)["loss"].backward(), timeline=False).peak_bytes)
        model.zero_grad(set_to_none=True)
    return found


@needs_meter
@pytest.mark.parametrize("budget", ["50%", "70%"])
def test_the_trace_for_real_keeps_the_budget(budget: str) -> None:
    torch.manual_seed(0)
    model, x = Otherwise(1), torch.randn(512, 64)
    handle = lowtide.limit_memory(model, budget=budget)
    found = peaks(model, x, 3)
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    assert max(found) <= handle.plan.budget_bytes


@needs_meter
def test_a_first_step_astray_and_above_the_budget_is_the_only_one() -> None:
    torch.manual_seed(0)
    model, x = Otherwise(8), torch.randn(512, 64)
    handle = lowtide.limit_memory(model, budget="70%")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = peaks(model, x, 4)
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    assert max(found[1:]) <= handle.plan.budget_bytes < found[0]
    assert [w.category for w in said if issubclass(w.category, LowtideWarning)] == [LowtideWarning]


@needs_meter
def test_what_no_plan_holds_is_said_and_the_steps_go_on() -> None:
    torch.manual_seed(0)
    model, x = Otherwise(8), torch.randn(512, 64)
    handle = lowtide.limit_memory(model, budget="50%")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = peaks(model, x, 4)
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    assert max(found) < 1.1 * found[0], "the step that is traced for real takes no more than the others"
    assert any("no plan fits" in str(w.message) for w in said)
