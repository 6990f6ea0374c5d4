"""`lowtide.apply`: a step under a plan, made for it or for another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import PlanError

N = 16


def batch() -> torch.Tensor:
    return torch.randn(8, N, generator=torch.Generator().manual_seed(3))


class Behind(nn.Module):
    """Overwrites, where the dispatcher does not look, what an operation has written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(self.first(x))
        y = h.detach() * 1.0
        y.numpy()[1:3] = 7.0
        return torch.tanh(self.last(y * h * y)).square().sum()


def test_a_plan_is_needed_to_apply_one() -> None:
    model = nn.Linear(N, N)
    graph = lowtide.trace(lambda: model(batch()).sum(), costs=False)
    for wrong in (None, graph):
        with pytest.raises(
            PlanError, match=f"apply takes a Plan, not {type(wrong).__name__}: make one with lowtide.plan"
        ):
            lowtide.apply(wrong)  # type: ignore[arg-type]


def test_apply_verifies_its_first_step(same: Any, everything: Any) -> None:
    model = Behind()
    plan = everything(lowtide.trace(lambda: model(batch())))
    step = lowtide.apply(plan)
    with step:
        model(batch()).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(batch()).backward()
    assert all(same(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    assert step.findings


def test_apply_departs_safely_from_a_plan_for_another_step(same: Any, everything: Any) -> None:
    model = nn.Sequential(nn.Linear(N, N), nn.GELU(), nn.Linear(N, N), nn.Tanh())
    other = nn.Sequential(
        nn.Linear(N, N), nn.Sigmoid(), nn.LayerNorm(N), nn.Linear(N, N), nn.ReLU(), nn.Softmax(-1)
    )
    plan = everything(lowtide.trace(lambda: model(batch()).sum()))
    grads = []
    for planned in (False, True):
        other.zero_grad()
        if planned:
            step = lowtide.apply(plan)
            with pytest.warns(lowtide.LowtideWarning, match="other operations than the applied plan"), step:
                other(batch()).square().sum().backward()
            assert step.departed > 0
        else:
            other(batch()).square().sum().backward()
        grads.append([p.grad.clone() for p in other.parameters()])
    assert all(map(same, *grads))


def test_apply_is_entered_again_and_refuses_to_nest_itself(everything: Any) -> None:
    model = nn.Linear(N, N)
    step = lowtide.apply(everything(lowtide.trace(lambda: model(batch()).exp().sum())))
    for _ in range(3):
        with step:
            model(batch()).exp().sum().backward()
    with step, pytest.raises(lowtide.PlanError, match="nest"), step:
        pass
    with pytest.raises(lowtide.PlanError, match="verify"):
        lowtide.apply(step.plan, verify="sometimes")  # type: ignore[arg-type]


def test_plans_work_after_json(same: Any, everything: Any) -> None:
    model = nn.Sequential(nn.Linear(N, N), nn.GELU(), nn.Dropout(0.5), nn.Linear(N, N), nn.Tanh())
    plan = lowtide.Plan.from_json(everything(lowtide.trace(lambda: model(batch()).sum())).to_json())
    grads = []
    for step in (None, lowtide.apply(plan)):
        model.zero_grad()
        torch.manual_seed(0)
        if step is None:
            model(batch()).sum().backward()
        else:
            with step:
                model(batch()).sum().backward()
            assert plan.replayed and step.departed == 0
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(same, *grads))
