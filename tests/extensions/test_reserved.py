"""A budget of what PyTorch's caching allocator reserves (`tests/gpu` holds one on a card)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from random_graphs import random_graph

import lowtide
from lowtide import BudgetError
from lowtide.extensions.reserved.reserved import within_reserved
from lowtide.graph import StepGraph
from lowtide.plan import Plan, make

MIB = 1 << 20
GRAPH = random_graph(1)


@dataclass
class Plans:
    """Plans by the bytes that they leave free, down to the smallest; blocks waste a third of each."""

    limit: int
    smallest: int
    tried: int = 0

    def policy(self, graph: StepGraph, budget: int | None = None) -> Plan:
        self.tried += 1
        assert budget is not None
        if budget < self.smallest:
            raise BudgetError("too small", self.smallest)
        return replace(make(graph, policy="full"), predicted_peak_bytes=budget)

    def reserved(self, plan: Plan) -> int:
        return plan.predicted_peak_bytes * 3 // 2


def test_a_plan_whose_blocks_fit_is_found() -> None:
    plans = Plans(limit=900 * MIB, smallest=100 * MIB)
    plan = within_reserved(GRAPH, plans.limit, plans.policy(GRAPH, plans.limit), plans.policy, plans.reserved)
    assert 0.7 * plans.limit < plans.reserved(plan) <= plans.limit
    assert any("allocator reserves" in note for note in plan.notes) and plans.tried <= 8


def test_the_last_plan_that_fits_is_found_beside_those_that_do_not_exist() -> None:
    plans = Plans(limit=900 * MIB, smallest=570 * MIB)  # a first step of 450 MiB less finds none
    plan = within_reserved(GRAPH, plans.limit, plans.policy(GRAPH, plans.limit), plans.policy, plans.reserved)
    assert plans.reserved(plan) <= plans.limit


def test_the_refusal_says_the_least_that_was_found() -> None:
    plans = Plans(limit=900 * MIB, smallest=700 * MIB)
    with pytest.raises(BudgetError, match="too small for what PyTorch's allocator reserves") as caught:
        within_reserved(GRAPH, plans.limit, plans.policy(GRAPH, plans.limit), plans.policy, plans.reserved)
    assert plans.smallest * 1.5 <= (caught.value.smallest_bytes or 0) < plans.limit * 1.5
    assert "expandable_segments" in str(caught.value)
    named = caught.value.smallest_bytes
    assert named is not None
    within_reserved(GRAPH, named, plans.policy(GRAPH, named), plans.policy, plans.reserved)


def test_without_it_the_budget_is_of_requested_bytes() -> None:
    model = torch.nn.Linear(64, 64)
    handle = lowtide.limit_memory(model, "auto")  # of which None makes one of reserved bytes on CUDA alone
    model(torch.ones(8, 64)).sum().backward()
    assert handle.plan is not None and not any("reserves" in note for note in handle.plan.notes)
