"""Local search: single decisions changed lower a plan's peak, until it fits."""

from __future__ import annotations

from random_graphs import random_graph
from synthetic import transformer

from lowtide.plan.local_search import LocalSearch
from lowtide.plan.simulate import Simulator


def test_changing_single_decisions_lowers_the_peak() -> None:
    """From everything evicted: what is stored to begin with makes the replays that are live at the peak
    shorter.
    """
    search = LocalSearch(Simulator(transformer(3)))
    start = search.candidate(frozenset())
    better = search.lower(start)
    assert better.simulation.peak_bytes < start.simulation.peak_bytes
    assert search.lower(start).stored == better.stored


def test_a_plan_is_lowered_until_it_fits() -> None:
    search = LocalSearch(Simulator(transformer(3)))
    start = search.candidate(frozenset())
    low = search.lower(start).simulation.peak_bytes
    budget = (low + start.simulation.peak_bytes) // 2
    assert low <= search.lower(start, budget).simulation.peak_bytes <= budget
    assert search.lower(start, start.simulation.peak_bytes) is start


def test_what_is_live_without_replays_is_never_more_than_what_is_live() -> None:
    for seed in range(40):
        sim = Simulator(random_graph(seed, 4 + seed % 9))
        search = LocalSearch(sim)
        for stored in (frozenset(sim.droppable), frozenset(sim.droppable[::2]), frozenset[int]()):
            candidate = search.candidate(stored)
            for event in range(sim.end):
                least = sim.least_at(candidate.stored, event)
                assert least <= candidate.simulation.top_bytes[event]
                assert least == candidate.simulation.top_bytes[event] or candidate.simulation.replayed
