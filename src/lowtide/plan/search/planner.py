"""The planner: the least extra seconds within a budget.

In: a step graph and a budget in bytes. Out: a `Candidate` whose exactly simulated peak is within the budget.
First the bound's relaxed decisions are rounded, brought into the budget by single decisions and exchanged
while that pays; with some room in the budget that comes within half a per cent of the step of the bound.
Near the smallest budget replays that wait for each other set the peak, which the relaxation does not see:
there exact simulations correct it (`corrected`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property, lru_cache

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan.bound.program import Floats
from lowtide.plan.bound.relaxation import Relaxation
from lowtide.plan.search.corrected import corrected, rounded
from lowtide.plan.search.local import Candidate, LocalSearch
from lowtide.plan.search.minimum_peak import minimum_peak
from lowtide.plan.simulate.refusal import refusal
from lowtide.plan.simulate.simulator import Simulator
from lowtide.plan.split.blocks import full_stored, sqrt_stored
from lowtide.plan.split.stages import find_stages
from lowtide.progress import current

_GOOD_GAP = 0.005
"""Distance to the bound, as a share of the step's time, at which the search stops."""

_NEAR_GAP = 0.0025
"""The distance up to which decisions that were rounded once do as they are."""

_WIDE_GAP = 0.01
"""The distance, as a share of the step's time, from which the search for the smallest peak pays."""

_OVER = 0.25
"""How far beyond the budget, as a share of it, single decisions are tried to bring a plan back into it."""

_STAGES_A_SEGMENT = (1, 1.5, 2, 3, 4, 6, 8)
"""How many stages there are to a segment of the plans that keep the borders of segments."""

_WHOLE_COLUMNS = 6000
"""Largest program that is solved in whole numbers; one of 4,500 columns takes 7 s on one core."""

_STARTS = 4
"""Plans that are exchanged in where the best one alone stays far from the bound."""

_CORRECTIONS = 12
"""Times that the program is asked anew, each time corrected by an exact simulation."""

_VAIN = 4
"""Of these, how many in a row may find nothing better."""


class Planner:
    """Plans one step graph; what it has found serves later budgets."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.lock = threading.RLock()
        """held by whoever solves: equal steps share a planner"""
        self.sim = Simulator(graph)
        self.search = LocalSearch(self.sim)
        self.stages = find_stages(self.sim)
        self.relaxation = Relaxation(self.sim, self.stages)
        self._relaxed: dict[tuple[int, bool], tuple[float, Floats]] = {}
        self._found_before: list[Candidate] = []
        self._exchanged: dict[tuple[frozenset[int], int], Candidate] = {}

    @cached_property
    def smallest(self) -> Candidate:
        """The plan with the smallest peak that is found. It does not depend on measured seconds: what a
        refusal names can be met in every process.
        """
        current().say("searching for the least memory")
        stored = minimum_peak(self.sim, self.stages, self.family)
        return Candidate(stored, self.sim.simulate(stored))

    def family(self, search: LocalSearch | None = None) -> list[Candidate]:
        """Plans that need no search: keep everything, evict everything, per block, and by segments of several
        lengths.
        """
        search = search or self.search
        wishes = [frozenset(self.sim.droppable), frozenset[int]()]
        lengths = [max(1, round(len(self.stages) / stages)) for stages in _STAGES_A_SEGMENT]
        for segments in (None, *lengths):
            wishes.append(sqrt_stored(self.graph, self.sim, segments, self.stages))
        with suppress(PlanError):  # a step without modules has no blocks
            wishes.append(full_stored(self.graph, self.sim))
        return [search.candidate(wish) for wish in dict.fromkeys(wishes)]

    def solve(self, budget: int) -> Candidate:
        """The best plan found whose simulated peak is within ``budget`` bytes.

        Raises:
            BudgetError: none is.
        """
        family = self.family()
        if family[0].simulation.peak_bytes <= budget:
            return family[0]
        if self.relaxation.least_peak > budget:  # which is no bound where backward runs more than once
            best = self.smallest if self.smallest.simulation.peak_bytes <= budget else None
        elif every := self.search.everything():
            best = self._best([*family, *every], budget, 0)
        else:
            best = self._searched(family, budget)
        if best is None:
            raise refusal(self.sim, self.smallest.simulation, budget)
        self._found_before.append(best)  # a larger budget is never slower
        return min((c for c in self._found_before if c.simulation.peak_bytes <= budget), key=lambda c: c.key)

    def begun(self, starts: Iterable[frozenset[int]], budget: int, good: float) -> Candidate | None:
        """The best plan that sets of stored values lead to, without a search, where it lies near the bound:
        within `_GOOD_GAP` or a share ``good`` of the step's time.
        """
        found: list[Candidate] = []
        for stored in dict.fromkeys(starts):
            try:
                found.append(self.search.candidate(stored))
            except PlanError:
                continue
        best = self._best(self._lowered(found, budget), budget, 1)
        if best is None:
            return None
        distance = self.distance(best.simulation.extra_seconds, budget)
        if distance > max(_GOOD_GAP, good) * self.graph.plain_seconds:
            return None
        self._found_before.append(best)
        return best

    def distance(self, extra_seconds: float, budget: int) -> float:
        """Seconds between a plan's extra time and what the relaxation says for ``budget`` bytes."""
        replays = extra_seconds - self.graph.overhead_seconds
        near = replays - self._solved(budget, windows=False)[0]
        if near <= _GOOD_GAP * self.graph.plain_seconds:
            return near
        return replays - self._solved(budget, windows=True)[0]

    def _searched(self, family: list[Candidate], budget: int) -> Candidate | None:
        """The best plan of a step that is too large for all its plans to be tried."""
        pool = family
        for windows in (False, True):  # they take most of the time, and often bring nothing
            pool = [*pool, *self._rounded(budget, windows)]
            best = self._best(pool, budget, 1)
            if not self._far(best, budget, _NEAR_GAP):
                return best
        best = self._best(pool, budget, _STARTS)
        if not self._far(best, budget, _GOOD_GAP):
            return best
        wide = self._windows_bind(budget)
        if not wide:  # a small program
            pool += self._whole(budget, windows=False)
            best = self._best(pool, budget, _STARTS)
            if not self._far(best, budget, _GOOD_GAP):
                return best
        best = self._corrected(best, budget)
        if best is not None:
            pool.append(best)
        if not self._far(best, budget, _GOOD_GAP):
            return best
        pool += self._lowered(family, budget)
        if wide:
            pool += self._whole(budget, windows=True)
        best = self._best(pool, budget, _STARTS)
        if not self._far(best, budget, _WIDE_GAP):
            return best
        return self._best([*pool, self.smallest], budget, _STARTS)

    def _solved(self, budget: int, windows: bool) -> tuple[float, Floats]:
        """The relaxation's answer: seconds that no schedule undercuts, recording aside, and its decisions."""
        key = (budget, windows)
        if key not in self._relaxed:
            self._relaxed[key] = self.relaxation.solve(budget, windows)
        return self._relaxed[key]

    def _far(self, best: Candidate | None, budget: int, share: float) -> bool:
        """Whether more than ``share`` of the step's time lies between a plan and the bound for ``budget``."""
        if best is None:
            return True
        gap = best.simulation.extra_seconds - self.relaxation.bound(budget).extra_seconds
        return gap > share * self.graph.plain_seconds

    def _best(self, pool: list[Candidate], budget: int, starts: int) -> Candidate | None:
        """The best plan that fits, after decisions in the ``starts`` best ones were exchanged."""
        fitting = {c.stored: c for c in pool if c.simulation.peak_bytes <= budget}
        ordered = sorted(fitting.values(), key=lambda c: c.key)
        exchanged = [self._faster(start, budget) for start in ordered[:starts]]
        return min([*exchanged, *ordered[:1]], key=lambda c: c.key, default=None)

    def _faster(self, start: Candidate, budget: int) -> Candidate:
        """``start`` after decisions were exchanged; the best of a pool are asked for again as it grows."""
        key = (start.stored, budget)
        if key not in self._exchanged:
            self._exchanged[key] = self.search.faster(start, budget)
        return self._exchanged[key]

    def _lowered(self, candidates: list[Candidate], budget: int) -> list[Candidate]:
        """``candidates`` after single decisions at the peak were changed in those slightly too high."""
        return [
            self.search.lower(c, budget) if 0 < c.simulation.peak_bytes - budget < _OVER * budget else c
            for c in candidates
        ]

    def _rounded(self, budget: int, windows: bool) -> list[Candidate]:
        """Plans that store what the relaxed decisions mostly store."""
        current().say("rounding the best possible")
        bound, point = self._solved(budget, windows)
        if bound == float("inf"):
            return []
        return self._lowered(rounded(self.relaxation, self.search, point), budget)

    def _corrected(self, best: Candidate | None, budget: int) -> Candidate | None:
        """The better of ``best`` and plans of the program after exact simulations have corrected it."""
        current().say("searching")
        vain = 0
        for found in corrected(self.relaxation, self.search, budget, _CORRECTIONS):
            other = self._best(found, budget, 1)
            vain += 1
            if other is not None and (best is None or other.key < best.key):
                best, vain = other, 0
            if vain == _VAIN or not self._far(best, budget, _GOOD_GAP):
                break
        return best

    def _windows_bind(self, budget: int) -> bool:
        """Whether the replayed values that wait in a stage's backward make the bound sharper."""
        more = self._solved(budget, windows=True)[0] - self._solved(budget, windows=False)[0]
        return more > 0.1 * _GOOD_GAP * self.graph.plain_seconds

    def _whole(self, budget: int, windows: bool) -> list[Candidate]:
        """The plan of the bound's program in whole numbers, which makes its bound sharper, too."""
        current().say("comparing with the best possible")
        bound, _ = self.relaxation.solve(budget, windows)
        if bound == float("inf") or len(self.relaxation.program.cost) > _WHOLE_COLUMNS:
            return []
        good = _GOOD_GAP * self.graph.plain_seconds
        _, whole = self.relaxation.solve_whole(budget, 0.2 * good / max(bound, good))
        if whole is None:
            return []
        wish = frozenset(v for v, k in self.relaxation.column.items() if whole[k] > 0.5)
        return self._lowered([self.search.candidate(wish)], budget)


@lru_cache(maxsize=2)
def planner_of(graph: StepGraph) -> Planner:
    """The planner of a step: a budget that cannot be met is often followed by another for the same step."""
    return Planner(graph)
