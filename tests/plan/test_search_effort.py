"""What a search may take is counted: it ends soon once a plan fits, and the same graph gets the same plan."""

from __future__ import annotations

import pytest
from synthetic import residual_network, transformer

from lowtide import policies
from lowtide.errors import PlanError
from lowtide.plan import search
from lowtide.plan.bound import Relaxation
from lowtide.plan.search import Search
from lowtide.plan.simulate.simulator import Simulator


def test_a_search_ends_soon_after_a_plan_fits() -> None:
    graph = transformer(4)
    seconds = 20 * len(graph.operations) * 1e-6
    soon, long = Search(graph), Search(graph)
    budget = (soon.relaxation.least_peak + 2 * soon.sim.plain_peak) // 3
    found, best = soon.solve(budget, seconds), long.solve(budget)
    assert found.simulation.peak_bytes <= budget and best.key <= found.key
    assert soon.effort.spent < 0.5 * long.effort.spent
    assert Search(graph).solve(budget, seconds).stored == found.stored
    assert soon.solve(budget).key <= found.key, "what was found soon hides nothing that takes longer"


def test_a_search_that_ends_by_itself_finds_the_same_whatever_it_may_take() -> None:
    graph = residual_network(3)
    planner = Search(graph)
    budget = (planner.relaxation.least_peak + planner.sim.plain_peak) // 2
    without = planner.solve(budget)
    assert Search(graph).solve(budget, 2 * planner.effort.spent * 1e-6).stored == without.stored


def test_a_plan_near_the_smallest_budget_is_found_whatever_the_search_may_take() -> None:
    graph = transformer(4)
    planner = Search(graph)
    smallest = planner.smallest.simulation.peak_bytes
    assert Search(graph).solve(smallest, 1e-9).simulation.peak_bytes <= smallest


def test_a_short_search_looks_for_no_second_plan_that_fits() -> None:
    graph = transformer(4)
    short, long = Search(graph), Search(graph)
    least = long.smallest.simulation.peak_bytes
    budget = least + (long.sim.plain_peak - least) // 100
    assert short.solve(budget, 1e-3).simulation.peak_bytes <= budget
    assert [bool(descent.spent) for descent in short.descents] == [True, False, False]
    long.solve(budget)
    assert all(descent.spent for descent in long.descents)


def test_the_search_for_the_least_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in simulations, not by a clock, so that every process names the same smallest budget."""
    graph = transformer(4)
    whole = Search(graph).smallest.simulation.peak_bytes
    taken: list[float] = []
    for share in (20, 20, 1):
        with monkeypatch.context() as patched:
            patched.setattr(search, "_DESCENT_EFFORT", share * len(graph.operations))
            stopped = Search(graph)
            assert stopped.smallest.simulation.peak_bytes >= whole
        taken.append(sum(descent.spent for descent in stopped.descents) / len(graph.operations))
    assert taken[0] == taken[1] <= 3 * 22 and taken[2] <= 3 * 3


def test_budgets_that_were_asked_for_before_change_no_descent() -> None:
    graph = transformer(3)
    first, second = Search(graph), Search(graph)
    budget = (first.smallest.simulation.peak_bytes + first.sim.plain_peak) // 2
    for descent in second.descents:
        descent.within(budget)
    assert second.smallest.stored == first.smallest.stored


def test_a_program_that_is_gone_on_with_has_the_answer_of_a_new_one() -> None:
    sim = Simulator(transformer(3))
    budget = Relaxation(sim).least_peak * 6 // 5
    fresh = Relaxation(sim).solve(budget)[0]
    relaxation = Relaxation(sim)
    beside = 0 * relaxation.fixed + budget // 20
    assert relaxation.solve(budget)[0] == fresh
    assert relaxation.solve(budget, beside)[0] > fresh
    relaxation.solve(budget + 1)
    again = Relaxation(sim)
    again.solve(budget, beside)
    assert again.solve(budget)[0] == pytest.approx(fresh, rel=1e-9)


def test_seconds_are_a_positive_number() -> None:
    for wrong in (0, -1.0, "2"):
        with pytest.raises(PlanError, match="more than 0"):
            policies.optimal(wrong)  # type: ignore[arg-type]
