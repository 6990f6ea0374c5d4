"""No plan undercuts the bound, whether its values are recomputed or move."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from moving_steps import graph_of
from random_graphs import all_plans, random_graph
from synthetic import one_linear

import lowtide
import lowtide.plan
from lowtide import policies
from lowtide.plan.bound import Relaxation
from lowtide.plan.data import Link
from lowtide.plan.simulate import Simulator, plain


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 6))
def test_bound_is_below_every_plan(seed: int, operations: int):
    graph = random_graph(seed, operations)
    plans = all_plans(graph)
    sim = Simulator(graph)
    for budget in sorted({peak for peak, _ in plans}):
        best = min(extra for peak, extra in plans if peak <= budget)
        bound = Relaxation(sim).bound(budget)
        assert bound.extra_seconds <= best + 1e-6
        assert bound.peak_bytes <= min(peak for peak, _ in plans)


def test_the_bound_is_stated_for_plans_that_move() -> None:
    graph = graph_of(8)
    budget = int(0.75 * lowtide.plan.plain(graph).peak_bytes)
    plan = policies.mixed("disk", links={"disk": Link(1e7, 1e7)}, min_bytes=1)(graph, budget)
    # all transfers hide beside the operations
    assert plan.moves and plan.bound_extra_seconds == plan.predicted_extra_seconds == 0
    slow = policies.mixed("disk", links={"disk": Link(3e5, 3e5)}, min_bytes=1)(graph, budget)
    assert 0 < slow.bound_extra_seconds <= slow.predicted_extra_seconds
    assert plan.bound_peak_bytes <= plan.predicted_peak_bytes <= budget
    again = policies.mixed("disk", links={"disk": Link(1e7, 1e7)}, min_bytes=1)(graph, budget)
    assert again.to_json() == plan.to_json()
    assert lowtide.Plan.from_json(plan.to_json()) == plan


def test_a_program_without_columns_says_whether_its_rows_hold():
    relaxation = Relaxation(Simulator(one_linear()))
    peak = plain(one_linear()).peak_bytes
    assert relaxation.solve(peak)[0] == 0.0
    assert relaxation.solve_whole(peak, 0.0)[0] == 0.0
    assert relaxation.solve(peak - 1)[0] == float("inf")
    assert relaxation.solve_whole(peak - 1, 0.0)[0] == float("inf")
