"""The planner: the least extra seconds within a budget.

In: a step graph and a budget in bytes. Out: a `Plan` whose exactly simulated peak is within the budget. The
forward is cut into stages (`lowtide.plan.stages`), every distinct stage is solved on its own
(`lowtide.plan.segment`), a shortest path combines them (`lowtide.plan.master`), the exact simulator corrects
what the cut could not see, and single values are exchanged at the end.
"""

from __future__ import annotations

import threading
from functools import cached_property, lru_cache

from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.plan.blocks import full_stored, sqrt_stored
from lowtide.plan.bound import Bound, Floats, Relaxation
from lowtide.plan.build import make_plan
from lowtide.plan.explain import refusal
from lowtide.plan.feasible import feasible_replays
from lowtide.plan.front import Known, known_stages
from lowtide.plan.lean import leanest, lowered
from lowtide.plan.master import Master
from lowtide.plan.plan import Plan
from lowtide.plan.search import Candidate, Search
from lowtide.plan.simulate import Simulator
from lowtide.plan.stages import find_stages
from lowtide.progress import current

_EFFORT = 2400
"""Evaluations of stage configurations, over all distinct stages."""

_QUICK_EFFORT = 200
"""The same for a first search, whose plan does where it lies near the bound."""

_QUICK_GAP = 0.0025
"""Distance to the bound, as a share of the step, up to which that is so."""

_GOOD_GAP = 0.005
"""Distance to the bound, as a share of the step, at which the search stops."""

_WIDE_GAP = 0.01
"""The distance at which a search for the least memory, which takes the longest, is worth its while near the
smallest budget.
"""

_NEAR = 1.05
"""Budgets up to this many times the least memory that measured seconds lead to are near the smallest."""

_LOWER = (0.25, 0.5, 0.75)
"""Where that leaves a gap near the smallest budget, paths for budgets in between are starts as well: with all
windows tight, a path that has more room may waste it."""

_MORE = (1.0, 1.0005)
"""Near the smallest budget, paths for so many times as much, or as what paths need at least, are starts as
well, once single decisions have made them fit.
"""

_STARTS = 4
"""Plans that are polished near the smallest budget."""

_OVER = 0.25
"""How far beyond the budget, as a share of it, a plan from the bound's own program may be for single
decisions to bring it back.
"""

_WHOLE_COLUMNS = 6000
"""Largest program that is solved in whole numbers."""

_QUICK_COLUMNS = 2000
"""Largest program that is solved in whole numbers to end a first search."""

_ALIKE = 2.5
"""Stages for each distinct one from which that takes long and finds little, for alike ones can be exchanged;
the search over stages sees to these.
"""

_ALIKE_COLUMNS = 2500
"""Largest program of such a step that is solved in whole numbers while the gap is not wide."""

_NODES = 20
"""Branch-and-bound nodes: most of what whole numbers bring comes from the root."""


class Planner:
    """Plans one step graph; the search over its stages is done once and serves every budget, and other steps
    with equal stages.

    Args:
        graph: the step.
        known: what earlier searches of stages found; by default those of this process.
    """

    def __init__(self, graph: StepGraph, known: Known | None = None) -> None:
        self.graph = graph
        self.lock = threading.RLock()
        """held by whoever solves: equal steps share a planner"""
        self.sim = Simulator(graph)
        self.search = Search(self.sim)
        self.stages = find_stages(self.sim)
        self.known = known_stages() if known is None else known
        self.relaxation = Relaxation(self.sim, self.stages)
        self._last: tuple[int, float, Floats] | None = None
        self._found_before: list[Candidate] = []
        self.bounds: dict[int, float] = {}
        """budget -> seconds that no schedule can undercut, the recording overhead aside"""

    @cached_property
    def quick(self) -> Master:
        """A short search over stages."""
        current().say("searching")
        return Master(self.sim, self.stages, feasible_replays(self.sim), _QUICK_EFFORT, self.known)

    @cached_property
    def master(self) -> Master:
        """The search over stages, where most of the time goes."""
        current().say("searching for longer")
        return Master(self.sim, self.stages, feasible_replays(self.sim), _EFFORT, self.known)

    @cached_property
    def leanest(self) -> Candidate:
        """The plan with the smallest peak that is found, whatever the measured seconds are: what a refusal
        names can be met in every process.
        """
        current().say("searching for the least memory")
        stored = leanest(self.sim, self.stages, _EFFORT, self.family, self.known)
        return Candidate(stored, self.sim.simulate(stored))

    def family(self, search: Search | None = None) -> list[Candidate]:
        """Plans that need no search: keep everything, give everything up, per block, by square root."""
        search = search or self.search
        found = [search.candidate(frozenset(self.sim.droppable)), search.candidate(frozenset())]
        for make in (full_stored, sqrt_stored):
            try:
                found.append(search.candidate(make(self.graph, self.sim)))
            except PlanError:
                continue
        return found

    def solve(self, budget: int) -> Candidate:
        """The best plan found whose simulated peak is within ``budget``.

        Raises:
            BudgetError: none is.
        """
        family = self.family()
        if family[0].simulation.peak_bytes <= budget:
            return family[0]
        if self.relaxation.least_peak() > budget:  # which is no bound where backward runs more than once
            if self.leanest.simulation.peak_bytes <= budget:
                return self.leanest
            raise self._refusal(budget)
        pool = [c for c in [*family, *self.search.everything()] if c.simulation.peak_bytes <= budget]
        everything = bool(self.search.everything())
        best = None
        if not everything:
            pool += self._walked(budget, self.quick)
            best = self._polished(pool, budget, 1)
            if best is not None and self._far(best, budget, _QUICK_GAP):
                best = self.improve(best, budget, _QUICK_GAP, _QUICK_COLUMNS)
                pool.append(best)
        if best is None or everything or self._far(best, budget, _QUICK_GAP):
            best = self._searched(pool, budget)
        # a larger budget is never slower
        fits = [c for c in self._found_before if c.simulation.peak_bytes <= budget]
        best = min([best, *fits], key=lambda c: c.key)
        self._found_before.append(best)
        return best

    def begun(self, starts: list[frozenset[int]], budget: int, good: float) -> Candidate | None:
        """The best plan that sets of stored values lead to, without a search, where it lies near the bound:
        as near as a first search has to come, or within a share ``good`` of the step.
        """
        found: list[Candidate] = []
        for stored in dict.fromkeys(starts):
            try:
                start = self.search.candidate(stored)
            except PlanError:
                continue
            if 0 < start.simulation.peak_bytes - budget < _OVER * budget:
                start = lowered(self.search, start, budget)
            if start.simulation.peak_bytes <= budget:
                found.append(start)
        best = self._polished(found, budget, 1)
        if best is None or self._far(best, budget, max(_QUICK_GAP, good)):
            return None
        self._found_before.append(best)
        return best

    def _searched(self, pool: list[Candidate], budget: int) -> Candidate:
        """The best plan that the whole search finds, and those of the pool, which fit.

        Raises:
            BudgetError: there is none.
        """
        everything = bool(self.search.everything())
        pool += self._walked(budget, self.master)
        least = self.search.candidate(self.master.stored(self.master.least()[1]))
        near = budget <= _NEAR * least.simulation.peak_bytes
        if near and not everything:
            pool += self._squeezed(budget, least.simulation.peak_bytes)
        pool += [least] if least.simulation.peak_bytes <= budget else []
        best = self._polished(pool, budget, 1)
        if best is not None and near and not everything and self._far(best, budget, _GOOD_GAP):
            pool += self._between(min(c.simulation.peak_bytes for c in pool), budget)
            best = self._polished(pool, budget, _STARTS)
        if best is None or (near and self._far(best, budget, _WIDE_GAP)):
            low = self.leanest.simulation.peak_bytes
            pool += [self.leanest] if low <= budget else []
            best = self._polished(pool + self._between(low, budget), budget, _STARTS)
        if best is None:
            raise self._refusal(budget)
        return best if everything else self.improve(best, budget)

    def _polished(self, pool: list[Candidate], budget: int, starts: int) -> Candidate | None:
        """The best plan after the ``starts`` best ones of the pool were polished; ``None`` where it is
        empty.
        """
        ordered = sorted({c.stored: c for c in pool}.values(), key=lambda c: c.key)
        if self.search.everything():
            return ordered[0] if ordered else None
        return min(
            (self.search.polish(start, budget) for start in ordered[:starts]),
            key=lambda c: c.key,
            default=None,
        )

    def _squeezed(self, budget: int, least: int) -> list[Candidate]:
        """Plans that paths for a little more than ``budget`` come to, after single decisions at their peaks
        were turned round until they fit.
        """
        found: list[Candidate] = []
        starts = {
            c.stored: c for more in _MORE for c in self._walked(int(more * max(budget, least)), self.master)
        }
        for start in sorted(starts.values(), key=lambda c: c.key):
            squeezed = lowered(self.search, start, budget)
            if squeezed.simulation.peak_bytes <= budget:
                found.append(squeezed)
        return found

    def _solved(self, target: int) -> tuple[float, Floats]:
        """The relaxation's answer, which is not looked for again when it was the last."""
        if self._last is None or self._last[0] != target:
            self._last = (target, *self.relaxation.solve(target))
        return self._last[1:]

    def distance(self, extra_seconds: float, budget: int) -> float:
        """Seconds between a plan's extra time and what the linear program says for ``budget``."""
        return extra_seconds - self.graph.overhead_seconds - self._solved(budget)[0]

    def _far(self, candidate: Candidate, budget: int, share: float) -> bool:
        """Whether more than a share of the step lies between a plan and the bound for ``budget``."""
        return self.distance(candidate.simulation.extra_seconds, budget) > share * self.graph.plain_seconds

    def _between(self, low: int, budget: int) -> list[Candidate]:
        """What paths for budgets between ``low``, which can be met, and ``budget`` come to."""
        return [
            c
            for share in _LOWER
            if low < budget
            for c in self._walked(low + int(share * (budget - low)), self.master)
        ]

    def _walked(self, budget: int, master: Master) -> list[Candidate]:
        """What paths through the stages come to that fit in ``budget``, as exact simulations correct what the
        stages say.
        """
        found: list[Candidate] = []
        master.restore()
        target = budget
        for _ in range(5):
            path = master.best(target)
            if path is None:
                break
            candidate = self.search.candidate(master.stored(path[1]))
            over = candidate.simulation.peak_bytes - budget
            if over <= 0:
                same = any(candidate.stored == other.stored for other in found)
                found.append(candidate)
                if same or over > -0.002 * budget or target < budget:
                    break
            elif over < 0.01 * budget:
                target -= over
            master.correct(path[1], candidate.simulation.top_bytes)
        master.restore()
        return found

    def bound(self, budget: int) -> Bound:
        """Lower bounds for ``budget``: what `improve` has found, or what the linear program says."""
        if budget >= self.sim.plain_peak:
            return Bound(0.0, self.relaxation.least_peak())
        if budget not in self.bounds:
            self.bounds[budget] = self._solved(budget)[0]
        return Bound(self.bounds[budget] + self.graph.overhead_seconds, self.relaxation.least_peak())

    def improve(
        self, best: Candidate, budget: int, enough: float = _GOOD_GAP, most_columns: int = _WHOLE_COLUMNS
    ) -> Candidate:
        """Where the gap to the bound is wide, take decisions from the bound's own program: rounded, then in
        whole numbers; those that exceed the budget are turned round at the peak until they fit.

        Args:
            best: a plan.
            budget: its budget.
            enough: the gap, as a share of the step, that is not wide.
            most_columns: the largest program that is solved in whole numbers.
        """
        current().say("comparing with the best possible")
        relaxation = self.relaxation
        values, column = relaxation.values, relaxation.column
        good = enough * self.graph.plain_seconds
        alike = len(self.stages) >= _ALIKE * len(set(self.stages.signature))
        target = budget
        for attempt in range(3):
            bound, point = self._solved(target)
            if not attempt:
                self.bounds[budget] = bound
            if best.simulation.extra_seconds - self.graph.overhead_seconds - self.bounds[
                budget
            ] <= good or bound == float("inf"):
                break
            points = [point]
            wide = (
                best.simulation.extra_seconds - self.graph.overhead_seconds - self.bounds[budget]
                > _WIDE_GAP * self.graph.plain_seconds
            )
            columns = min(most_columns, _WHOLE_COLUMNS if wide or not alike else _ALIKE_COLUMNS)
            if len(relaxation.program.cost) <= columns:
                sharper, whole = relaxation.solve_whole(target, _NODES, 0.2 * good / max(bound, good))
                if not attempt and sharper < float("inf"):
                    self.bounds[budget] = max(bound, sharper)
                if whole is not None:
                    points.append(whole)
            over = 0
            for decisions in points:
                other = self.search.candidate(frozenset(v for v in values if decisions[column[v]] > 0.5))
                over = other.simulation.peak_bytes - budget
                if 0 < over < _OVER * budget:
                    other = lowered(self.search, other, budget)
                if other.simulation.peak_bytes <= budget:
                    best = min(best, self.search.polish(other, budget), key=lambda c: c.key)
            if not 0 < over < _OVER * budget:
                break
            target -= over
        return best

    def _refusal(self, budget: int) -> BudgetError:
        return refusal(self.sim, self.leanest.simulation, budget)


@lru_cache(maxsize=2)
def planner_of(graph: StepGraph) -> Planner:
    """The planner of a step: a budget that cannot be met is often followed by another for the same step."""
    return Planner(graph)


def hopeless(graph: StepGraph, budget: int) -> bool:
    """Whether it is known without a search that recomputing cannot meet the budget."""
    planner = planner_of(graph)
    with planner.lock:
        return planner.relaxation.least_peak() > budget


def optimal(graph: StepGraph, budget: int | None = None) -> Plan:
    """The plan with the least extra seconds whose peak is within ``budget`` bytes (``None``: the smallest
    peak that can be met).

    Raises:
        BudgetError: no plan fits; the error carries the smallest budget that can be met.
    """
    planner = planner_of(graph)
    with planner.lock:
        limit = planner.leanest.simulation.peak_bytes if budget is None else budget
        best = planner.solve(limit)
        return make_plan(
            graph,
            stored=best.stored,
            policy="optimal",
            budget=budget,
            simulator=planner.sim,
            bound=planner.bound(limit),
        )
