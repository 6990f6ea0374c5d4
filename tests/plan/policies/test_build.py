"""Every policy ends in `make_plan`: it closes the set that is stored, keeps the budget, writes the table."""

from __future__ import annotations

from typing import Any

import pytest
from synthetic import transformer

from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.plan.data import Keep, Recompute
from lowtide.plan.simulate import Simulator
from lowtide.policies import make_plan


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return transformer(3)


def test_every_droppable_value_has_a_decision(graph: StepGraph) -> None:
    sim = Simulator(graph)
    plan = make_plan(graph, stored=sim.droppable[::2])
    assert plan.decisions.keys() == set(sim.droppable)
    assert {v for v, decision in plan.decisions.items() if decision == Keep()} >= set(sim.droppable[::2])
    assert set(plan.replayed) and Recompute() in plan.decisions.values()
    assert plan.predicted_peak_bytes == sim.simulate(plan.stored).peak_bytes


def test_the_program_runs_again_what_the_simulation_runs_again(graph: StepGraph) -> None:
    plan = make_plan(graph, stored=())
    forward = [op.index for op in graph.operations if op.phase == "forward"]
    again = {index for index, step in zip(forward, plan.program, strict=True) if step.replayed}
    assert again >= set(plan.replayed)
    assert not any(step.replayed for step in make_plan(graph, stored=Simulator(graph).all_stored).program)


def test_the_table_has_every_byte_that_stays(graph: StepGraph) -> None:
    plan = make_plan(graph, stored=Simulator(graph).all_stored)
    assert sum(row.kept_bytes for row in plan.modules) == sum(row.saved_bytes for row in plan.modules) > 0
    assert sum(row.replayed_operations for row in make_plan(graph, stored=()).modules) > 0


def test_a_plan_above_its_budget_is_refused(graph: StepGraph) -> None:
    least = make_plan(graph, stored=()).predicted_peak_bytes
    assert make_plan(graph, stored=(), budget=least).budget_bytes == least
    with pytest.raises(BudgetError) as refusal:
        make_plan(graph, stored=(), budget=least - 1)
    assert refusal.value.smallest_bytes == least


@pytest.mark.parametrize(
    "given", [{"stored": "all"}, {"stored": [10**9]}, {"stored": (), "moves": [1]}, {"stored": (), "slab": 3}]
)
def test_what_is_no_argument_is_refused(graph: StepGraph, given: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        make_plan(graph, **given)
