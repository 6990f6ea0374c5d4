"""`lowtide.plan`: policies by name or as functions, budgets as text, and what is refused."""

from __future__ import annotations

import pytest
from synthetic import transformer

import lowtide.plan
from lowtide import policies
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.plan import Plan, resolve
from lowtide.plan.policies import make_plan

LAYERS = 4


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return transformer(LAYERS)


def test_policies_meet_budgets_or_say_what_they_need(graph: StepGraph):
    plan = policies.full()(graph)
    assert policies.full()(graph, plan.predicted_peak_bytes).budget_bytes == plan.predicted_peak_bytes
    with pytest.raises(BudgetError) as error:
        policies.full()(graph, plan.predicted_peak_bytes - 1)
    assert error.value.smallest_bytes == plan.predicted_peak_bytes


def test_names_resolve_and_a_users_function_is_a_policy(graph: StepGraph):
    assert lowtide.plan(graph, policy="full").policy == "full"  # type: ignore[operator]
    with pytest.raises(PlanError, match="there is no policy 'fastest'"):
        resolve("fastest")

    def every_second(graph: StepGraph, budget: int | None = None) -> Plan:
        return make_plan(
            graph,
            stored=[v.id for v in graph.values if v.id % 2 and v.storable],
            policy="every_second",
            budget=budget,
        )

    plan = lowtide.plan.make(graph, policy=every_second)
    assert plan.policy == "every_second" and plan.replayed


def test_budgets_are_read_as_text() -> None:

    from lowtide.plan.simulate import plain

    graph = transformer(2)
    peak = plain(graph).peak_bytes
    assert lowtide.plan(graph, budget="100%").predicted_peak_bytes == peak
    assert lowtide.plan(graph, budget="90%").budget_bytes == peak * 90 // 100
    assert lowtide.plan(graph, budget=f"{peak}B").budget_bytes == peak


def test_what_is_no_graph_and_no_plan_is_said(graph: StepGraph):
    for wrong in (None, "graph", 3):
        with pytest.raises(
            PlanError, match=rf"takes a StepGraph, not {type(wrong).__name__}: make one with lowtide.trace"
        ):
            lowtide.plan.make(wrong, "1GiB")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="returned NoneType, not a Plan"):
        lowtide.plan.make(graph, policy=lambda graph, budget=None: None)  # type: ignore[arg-type]
