"""A budget in per cent is of the largest step that was planned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide


def deep() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)], nn.Linear(64, 1))


def test_a_small_last_batch_has_as_much_memory_as_those_before() -> None:
    model = deep()
    handle = lowtide.limit_memory(model, "50%", loss_fn=torch.mean)
    budgets = []
    for rows in (2048, 16, 4096, 2048):
        model(torch.randn(rows, 64)).mean().backward()
        model.zero_grad()
        plan = handle.plan
        assert plan is not None and plan.budget_bytes is not None
        budgets.append(plan.budget_bytes)
        assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert budgets[0] == budgets[1] < budgets[2] and budgets[0] <= budgets[3] <= budgets[2]


def test_a_small_first_batch_is_refused_in_its_own_terms() -> None:
    handle = lowtide.limit_memory(deep(), "50%", loss_fn=torch.mean)
    with pytest.raises(lowtide.BudgetError, match="100% of the plain step's peak"):
        handle.prepare(torch.randn(16, 64))
    assert handle.prepare(torch.randn(2048, 64)).budget_bytes is not None


def test_a_policy_is_asked_once_for_steps_that_are_alike() -> None:
    asked = []

    def policy(graph: lowtide.StepGraph, budget: int | None) -> lowtide.Plan:
        asked.append(graph)
        if len(asked) > 1:
            raise lowtide.BudgetError("this policy plans once")
        return lowtide.policies.sqrt()(graph, budget)

    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4096))
    handle = lowtide.limit_memory(model, "100%", policy=policy, loss_fn=lambda output: output.square().sum())
    gradients = []
    for _ in range(3):
        torch.manual_seed(0)
        model(torch.randn(64, 64)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert len(asked) == 1 and handle.plan is not None
    assert all(torch.equal(one, other) for one, other in zip(gradients[0], gradients[2], strict=True))
