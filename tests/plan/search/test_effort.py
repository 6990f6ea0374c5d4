"""What a search may take is counted: it ends soon once a plan fits, and the same graph gets the same plan."""

from __future__ import annotations

from itertools import product

import pytest

from lowtide.errors import PlanError
from lowtide.plan import policies
from lowtide.plan.bound.relaxation import Relaxation
from lowtide.plan.search import minimum_peak
from lowtide.plan.search.planner import Planner
from lowtide.plan.simulate.simulator import Simulator

from ..synthetic import residual_network, transformer


def test_a_search_ends_soon_after_a_plan_fits() -> None:
    graph = transformer(4)
    seconds = 20 * len(graph.operations) * 1e-6
    soon, long = Planner(graph), Planner(graph)
    budget = (soon.relaxation.least_peak + 2 * soon.sim.plain_peak) // 3
    found, best = soon.solve(budget, seconds), long.solve(budget)
    assert found.simulation.peak_bytes <= budget and best.key <= found.key
    assert soon.effort.spent < 0.5 * long.effort.spent
    assert Planner(graph).solve(budget, seconds).stored == found.stored
    assert soon.solve(budget).key <= found.key, "what was found soon hides nothing that takes longer"


def test_a_search_that_ends_by_itself_finds_the_same_whatever_it_may_take() -> None:
    graph = residual_network(3)
    planner = Planner(graph)
    budget = (planner.relaxation.least_peak + planner.sim.plain_peak) // 2
    without = planner.solve(budget)
    assert Planner(graph).solve(budget, 2 * planner.effort.spent * 1e-6).stored == without.stored


def test_a_plan_near_the_smallest_budget_is_found_whatever_the_search_may_take() -> None:
    graph = transformer(4)
    planner = Planner(graph)
    smallest = planner.smallest.simulation.peak_bytes
    assert Planner(graph).solve(smallest, 1e-9).simulation.peak_bytes <= smallest


def test_the_search_for_the_least_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in simulations, not by a clock, so that every process names the same smallest budget."""
    graph = transformer(4)
    whole = Planner(graph).smallest.simulation.peak_bytes
    taken: list[float] = []
    for share in (60, 60, 1):
        simulated = 0
        simulate = Simulator.simulate

        def counted(self: Simulator, *args: object, simulate=simulate) -> object:
            nonlocal simulated
            simulated += 1
            return simulate(self, *args)

        with monkeypatch.context() as patched:
            patched.setattr(minimum_peak, "_EFFORT", share * len(graph.operations))
            patched.setattr(Simulator, "simulate", counted)
            planner = Planner(graph)
            assert planner.smallest.simulation.peak_bytes >= whole
        taken.append(simulated)
    assert taken[0] == taken[1] <= 80 and taken[2] <= 30


def test_a_program_that_is_gone_on_with_has_the_answer_of_a_new_one() -> None:
    sim = Simulator(transformer(3))
    budget = Relaxation(sim).least_peak * 6 // 5
    fresh = {windows: Relaxation(sim).solve(budget, windows)[0] for windows in (False, True)}
    for order in product((False, True), repeat=2):
        relaxation = Relaxation(sim)
        for windows in order:
            assert relaxation.solve(budget, windows)[0] == pytest.approx(fresh[windows], rel=1e-9)
        beside = 0 * relaxation.fixed + 1000
        relaxation.solve_beside(budget, beside)
        assert relaxation.solve(budget, order[-1])[0] == pytest.approx(fresh[order[-1]], rel=1e-9)


def test_seconds_are_a_positive_number() -> None:
    for wrong in (0, -1.0, "2"):
        with pytest.raises(PlanError, match="more than 0"):
            policies.optimal(wrong)  # type: ignore[arg-type]
