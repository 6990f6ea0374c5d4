"""How long a search for a plan may take: `plan_seconds`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import policies
from lowtide.plan import check_seconds, within_seconds
from lowtide.plan.data import Link
from lowtide.run.profile.costs import MeasuredCost


class Chain(nn.Module):
    """Small operations whose search takes more than a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full((32, 64 + 8 * (k % 3)), 0.02)) for k in range(24)
        )
        self.backs = nn.ParameterList(
            nn.Parameter(torch.full((64 + 8 * (k % 3), 32), 0.02)) for k in range(24)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, back in zip(self.weights, self.backs, strict=True):
            x = x + torch.tanh(torch.sin(x @ weight) @ back)
        return x.square().mean()


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture
def equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation takes as long, so that each run finds the same plans."""
    monkeypatch.setattr(MeasuredCost, "read", lambda cost: (1e-5, cost.scratch_bytes, cost.blocks))


def test_a_longer_search_finds_a_better_plan_in_the_first_step(equal_times: None) -> None:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(64, 32)
    plain, plans = step(model, x), []
    for seconds in (1e-6, 20):
        handle = lowtide.limit_memory(model, "min", plan_seconds=seconds)
        assert all(map(torch.equal, plain, step(model, x)))
        plans.append(handle.plan)
        assert all(map(torch.equal, plain, step(model, x)))
        assert handle.plan is not None and handle.plan.stored == plans[-1].stored
        assert handle.measured_peak_bytes == handle.plan.predicted_peak_bytes
        handle.remove()
    short, long = plans
    assert any("ended early" in note for note in short.notes) and not long.notes
    assert long.predicted_extra_seconds < short.predicted_extra_seconds and long.gap < short.gap
    assert long.budget_bytes == short.budget_bytes


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan, "3", True])
def test_what_is_no_time_is_refused(seconds: Any) -> None:
    for ask in (
        lambda: lowtide.limit_memory(nn.Linear(2, 2), "60%", plan_seconds=seconds),
        lambda: lowtide.compile(nn.Linear(2, 2), "60%", plan_seconds=seconds),
    ):
        with pytest.raises(lowtide.PlanError, match="seconds, more than 0"):
            ask()


@pytest.mark.parametrize("policy", ["full", policies.sqrt(), policies.optimal(3), lambda graph, budget: None])
def test_a_policy_that_has_no_use_for_a_time_is_refused(policy: Any) -> None:
    with pytest.raises(lowtide.PlanError, match="leave one of them out"):
        lowtide.limit_memory(nn.Linear(2, 2), "60%", policy=policy, plan_seconds=3)


def test_policies_that_search_take_a_time() -> None:
    for policy in (None, "optimal", "mixed", policies.optimal(), policies.mixed("host")):
        check_seconds(3, policy, "plan_seconds")


def test_a_mixed_plan_is_found_in_time_and_with_more_time_is_better() -> None:
    model, x = Chain(), torch.randn(64, 32)
    graph = lowtide.trace(lambda: model(x))
    policy = policies.mixed("host", links={"host": Link(1e12, 1e12)}, min_bytes=1)
    budget = int(0.7 * lowtide.plan.plain(graph).peak_bytes)
    plans = [lowtide.plan(graph, budget, within_seconds(policy, s, "cpu")) for s in (1e-6, 30, None)]
    assert plans[1].moves
    assert any("ended early" in note for note in plans[0].notes)
    assert plans[1].predicted_extra_seconds < plans[0].predicted_extra_seconds
    assert plans[2].predicted_extra_seconds <= plans[1].predicted_extra_seconds * 1.05
