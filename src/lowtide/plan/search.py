"""The search for the least extra seconds within a budget.

In: a step graph and a budget in bytes. Out: a `Candidate` whose exactly simulated peak is within the budget.
First the bound's relaxed decisions are rounded, brought into the budget by changed decisions and exchanged
while that pays; unless the budget is tight, that comes within half a per cent of the step of the bound.
Near the smallest budget replays that wait for each other set the peak, which the relaxation does not see: so
each answer is simulated exactly, and the bytes held at each moment beyond those that the linear program
counts there are taken off that moment's budget when it is asked again.

`local_search.py` changes decisions of a candidate; the rounds here say of which, and for what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import islice
from operator import attrgetter

import numpy as np

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan.blocks import Segments, full_stored
from lowtide.plan.bound import A_SECOND, Effort, Floats, Relaxation
from lowtide.plan.local_search import Candidate, Descent, LocalSearch
from lowtide.plan.simulate.simulator import simulator_of
from lowtide.progress import current

_NEAR_GAP = 0.0025
"""Distance to the bound, as a share of the step's time, at which the first rounded decisions are taken."""

_GOOD_GAP = 0.005
"""The distance at which the search ends."""

_OVER = 0.25
"""How far above the budget, as a share of it, a rounded plan may lie for its decisions to be changed until it
fits."""

_MORE_SEGMENTS = 1.5
"""Factor from one number of segments that is tried to the next."""

_EFFORT = 33 * A_SECOND
"""The work of one search, where no smaller limit is given."""

_DESCENTS = 3
"""How many of the lowest baselines are lowered further (`Descent`)."""

_DESCENT_EFFORT = 0.93 * A_SECOND
"""The work of one descent."""

_LAST = 0.3
"""Share of the effort that is left, at least, to make the first plan that fits faster."""

_LOWERED = 0.1
"""Share of the effort that may go into bringing the first rounded decisions into the budget."""

_ENOUGH = 0.5
"""Share of the effort after which no further descent is begun once a plan fits."""

_ROUNDS = 12
"""How often the linear program is solved anew, each time corrected by an exact simulation."""

_VAIN = 8
"""Corrected solutions in a row that find nothing better before the search ends."""


class Search:
    """The search for plans of one step graph. Plans found for one budget serve later budgets, too."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.lock = threading.RLock()
        """held while solving: equal steps share a search"""
        self.sim = simulator_of(graph)
        self.effort = Effort(_EFFORT)
        self.local = LocalSearch(self.sim, self.effort)
        self.relaxation = Relaxation(self.sim, effort=self.effort)
        self._found_before: list[Candidate] = []

    @cached_property
    def baselines(self) -> list[Candidate]:
        """Plans that need no search: keep all (what scopes evict aside), evict all, per block, and by
        segments of several lengths.
        """
        wishes, segments, count = [self.sim.all_stored], Segments(self.sim), 1
        while count <= max(1, len(segments.operations) // 3):
            wishes.append(segments.stored(count))
            count = max(count + 1, round(count * _MORE_SEGMENTS))
        with suppress(PlanError):  # a step without modules has no blocks
            wishes.append(full_stored(self.sim))
        return [self.local.candidate(wish) for wish in dict.fromkeys(wishes)]

    @cached_property
    def descents(self) -> list[Descent]:
        """From the lowest baselines down. They change decisions by bytes alone: measured seconds differ from
        process to process, and the smallest budget that a refusal names has to work in every process.
        """
        lowest = sorted(self.baselines, key=attrgetter("height"))[:_DESCENTS]
        return [Descent(LocalSearch(self.sim, Effort(_DESCENT_EFFORT)), start) for start in lowest]

    @property
    def lowest(self) -> Candidate:
        """The plan with the smallest peak of all that this search has found, for whatever budget."""
        return min((self.smallest, *self._found_before), key=attrgetter("height"))

    @cached_property
    def smallest(self) -> Candidate:
        """The plan with the smallest peak that is found by bytes alone, in every process the same."""
        current().say("searching for the least memory")
        return min((descent.end() for descent in self.descents), key=attrgetter("height"))

    def lowest_within(self, seconds: float, budget: int = 0) -> Candidate:
        """The plan with the smallest peak that is found in about so many seconds, or the first one that is
        within ``budget`` bytes.
        """
        found = [self.lowest] if "smallest" in self.__dict__ else self._found_before
        if budget and (fitting := [c for c in found if c.simulation.peak_bytes <= budget]):
            return min(fitting, key=attrgetter("key"))
        if "smallest" in self.__dict__:
            return self.lowest
        local = LocalSearch(self.sim, Effort(seconds * A_SECOND))
        low = local.lower(min(self.baselines, key=attrgetter("height")), budget)
        self._found_before.append(low)
        return low

    def solve(self, budget: int, seconds: float | None = None, at_once: bool = False) -> Candidate:
        """The best plan found whose simulated peak is within ``budget`` bytes.

        Args:
            budget: bytes.
            seconds: about how long to search, once there is a plan that fits; ``None`` for half a minute.
            at_once: that there is one counts most. Only where ``seconds`` show none does it take longer.

        Raises:
            BudgetError: none is.
        """
        seconds = seconds / 2 if at_once and seconds else seconds  # the other half is the first plan's
        self.effort.renew(_EFFORT if seconds is None else min(_EFFORT, seconds * A_SECOND))
        everything = self.baselines[0]
        if everything.simulation.peak_bytes <= budget:
            return everything
        best = None
        if at_once and seconds is not None:
            low = self.lowest_within(seconds, budget)
            best = self.local.faster(low, budget) if low.simulation.peak_bytes <= budget else None
        if self.relaxation.least_peak <= budget:  # which is no bound where backward runs more than once
            best = self._search(budget, best, 1 if at_once else None)
        elif best is None and self.smallest.simulation.peak_bytes <= budget:
            best = self.local.faster(self.smallest, budget)
        if best is not None:
            self._found_before.append(best)
        # a larger budget is never slower, and what was found before fits again
        fitting = [c for c in self._found_before if c.simulation.peak_bytes <= budget]
        if not fitting:
            raise self.sim.refusal(self.smallest.simulation, budget)
        return min(fitting, key=attrgetter("key"))

    def ended_early(self, best: Candidate, budget: int) -> bool:
        """Whether the latest search, which found ``best``, ended at a limit below the usual one, while a plan
        with less extra time may exist.
        """
        return self.effort.over and self.effort.limit < _EFFORT and self._far(best, budget, _GOOD_GAP)

    def _search(self, budget: int, best: Candidate | None, descents: int | None) -> Candidate | None:
        """The best plan found, round after round, until one is close enough to the bound or the effort is
        spent; ``None`` where no plan fits.

        Args:
            budget: bytes.
            best: a plan that fits, if one is known.
            descents: how many descents may look for a plan that fits, and only while none is known; ``None``
                for all of them, in any case.
        """
        vain = 0

        def wanted() -> int | None:
            return 0 if descents and best else descents

        for number, found in enumerate(self._rounds(budget, wanted)):
            vain += 1
            if fitting := [c for c in found if c.simulation.peak_bytes <= budget]:
                new = self.local.faster(min(fitting, key=attrgetter("key")), budget)
                if best is None or new.key < best.key:
                    best, vain = new, 0
            enough = _GOOD_GAP if number else _NEAR_GAP
            over = best is not None and (vain == _VAIN or self.effort.over)
            if over or not self._far(best, budget, enough):
                break
        return best

    def _rounds(self, budget: int, wanted: Callable[[], int | None]) -> Iterator[list[Candidate]]:
        """Plans, the cheapest to find first; ``wanted`` says how many descents to run, ``None`` for all."""
        current().say("searching for a plan")
        bound, point = self.relaxation.solve(budget)
        yield [*self.baselines, *(self._rounded(point, budget) if bound < float("inf") else [])]
        found = list(islice(self._lows(budget), wanted()))
        self.effort.extend(_LAST)
        yield found
        yield from _correct(self.relaxation, self.local, budget)

    def _lows(self, budget: int) -> Iterator[Candidate]:
        """Plans that fit, from descents; after most of the effort no more than one."""
        found = False
        for descent in self.descents:
            if found and self.effort.spent > _ENOUGH * self.effort.limit:
                break
            spent = descent.spent
            low = descent.within(budget)
            self.effort.note(descent.spent - spent)
            if low is not None:
                found = True
                yield low

    def _far(self, best: Candidate | None, budget: int, share: float) -> bool:
        """Whether more than ``share`` of the step's time lies between a plan and the bound for ``budget``."""
        if best is None:
            return True
        gap = best.simulation.extra_seconds - self.relaxation.bound(budget).extra_seconds
        return gap > share * self.graph.plain_seconds

    def _rounded(self, point: Floats, budget: int) -> list[Candidate]:
        """The relaxed decisions, rounded; and, if that is slightly too high, the same after decisions at the
        peak were changed.
        """
        rounded = _round(self.relaxation, self.local, point)
        if not budget < rounded.simulation.peak_bytes < budget * (1 + _OVER):
            return [rounded]
        local = LocalSearch(self.sim, Effort(_LOWERED * self.effort.limit))
        low = local.lower(rounded, budget)
        self.effort.note(local.effort.spent)
        return [rounded, low]


def _round(relaxation: Relaxation, local: LocalSearch, point: Floats) -> Candidate:
    """The candidate that stores the values of which the relaxed decisions store more than half."""
    return local.candidate(frozenset(v for v, k in relaxation.column.items() if point[k] > 0.5))


def _correct(relaxation: Relaxation, local: LocalSearch, budget: int) -> Iterator[list[Candidate]]:
    """Rounded plans for ``budget`` bytes from the linear program, each corrected by the exact simulation of
    the one before; none where nothing fits.
    """
    margins = np.zeros(len(relaxation.fixed), dtype=np.int64)
    for number in range(_ROUNDS):
        seconds, point = relaxation.solve(budget, margins if number else None)
        if seconds == float("inf"):
            if not number:
                return
            margins //= 2
            continue
        rounded = _round(relaxation, local, point)
        low = local.lower(rounded, budget)
        yield [rounded, low]
        point = relaxation.point_of(low.stored, low.simulation.replayed)
        counted = relaxation.fixed + relaxation.occupancy(point)
        missed = np.maximum(0, low.simulation.top_bytes - counted).astype(np.int64)
        # halfway: the replays of one answer are not those of the next
        margins = (margins + missed) // 2 if number else missed


@lru_cache(maxsize=2)
def search_of(graph: StepGraph) -> Search:
    """The search of a step: a budget that cannot be met is often followed by another for the same step."""
    return Search(graph)
