"""Plans from decisions that were made before: for another size or budget of the step, or in another process.

In: a step graph, a budget, and decisions for the same program (`lowtide.plan.cache`). Out: a plan, simulated
exactly and compared with the bound for this step, or nothing where a search may find a better one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan.cache import Cache, Decisions
from lowtide.plan.data import Plan
from lowtide.plan.policies.build import make_plan
from lowtide.plan.search.planner import planner_of

CARRIED = "begun from decisions that were made before, which lie near the bound here, too"
"""A note of such plans."""

_WORSE = 0.005
"""By how much of the step a plan may lie further from the bound than the one that a search found there."""


def carried(graph: StepGraph, budget: int, known: Iterable[Decisions], most: int) -> Plan | None:
    """The best plan found from known decisions, or ``None`` where it is not near the bound.

    Args:
        graph: the step.
        budget: the most live bytes allowed.
        known: decisions for the same program.
        most: at least ``budget``: what decisions for this size and budget may use, as a search had to.
    """
    planner = planner_of(graph)
    with planner.lock:
        starts, good = list[frozenset[int]](), 0.0
        for one in known:
            starts.append(frozenset(v for v in one.stored if 0 <= v < len(graph.values)))
            if (one.budget_bytes, one.plain_peak_bytes) == (most, planner.sim.plain_peak):
                good = max(good, one.gap + _WORSE)
                with suppress(PlanError):
                    peak = planner.search.candidate(starts[-1]).simulation.peak_bytes
                    budget = peak if budget < peak <= most else budget
        found = planner.begun(starts, budget, good)
        if found is None:
            return None
        return make_plan(
            graph, stored=found.stored, policy="optimal", budget=budget, notes=(CARRIED,),
            simulator=planner.sim, bound=planner.relaxation.bound(budget),
        )  # fmt: skip


def keep(cache: Cache, graph: StepGraph, plan: Plan, most: int) -> None:
    """Keep what ``plan`` decided for ``graph`` within ``most`` bytes."""
    planner = planner_of(graph)
    with planner.lock:
        relaxed = planner.distance(plan.predicted_extra_seconds, plan.budget_bytes or most)
    gap = relaxed / max(graph.plain_seconds, 1e-12)
    cache.keep(graph, Decisions(tuple(sorted(plan.stored)), most, plan.plain_peak_bytes, gap))
