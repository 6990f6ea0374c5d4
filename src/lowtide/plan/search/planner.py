"""The planner: the least extra seconds within a budget.

In: a step graph and a budget in bytes. Out: a `Candidate` whose exactly simulated peak is within the budget.
First the bound's relaxed decisions are rounded, brought into the budget by single decisions and exchanged
while that pays; unless the budget is tight, that comes within half a per cent of the step of the bound.
Near the smallest budget replays that wait for each other set the peak, which the relaxation does not see:
exact simulations correct it for that (`corrected`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan.bound.effort import A_SECOND, Effort
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

_EFFORT = 25 * A_SECOND
"""What a search may take, where nobody says less, before what is found has to do."""

_CORRECTIONS = 12
"""Times that the program is solved anew, each time corrected by an exact simulation."""

_VAIN = 8
"""Of these, how many in a row may find nothing better."""


class Planner:
    """Plans one step graph; what it has found serves later budgets."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.lock = threading.RLock()
        """held while solving: equal steps share a planner"""
        self.sim = Simulator(graph)
        self.effort = Effort(_EFFORT)
        self.search = LocalSearch(self.sim, self.effort)
        self.stages = find_stages(self.sim)
        self.relaxation = Relaxation(self.sim, self.stages, effort=self.effort)
        self._relaxed: dict[tuple[int, bool], tuple[float, Floats]] = {}
        self._found_before: list[Candidate] = []

    @cached_property
    def smallest(self) -> Candidate:
        """The plan with the smallest peak that is found. It does not depend on measured seconds: what a
        refusal names can be met in every process.
        """
        current().say("searching for the least memory")
        stored = minimum_peak(self.sim, self.stages, self.baselines)
        return Candidate(stored, self.sim.simulate(stored))

    def baselines(self, search: LocalSearch | None = None) -> list[Candidate]:
        """Plans that need no search: keep all (what scopes evict aside), evict all, per block, and by
        segments of several lengths.
        """
        search = search or self.search
        wishes = [self.sim.all_kept, frozenset[int]()]
        lengths = [max(1, round(len(self.stages) / stages)) for stages in _STAGES_A_SEGMENT]
        for segments in (None, *lengths):
            wishes.append(sqrt_stored(self.sim, segments, self.stages))
        with suppress(PlanError):  # a step without modules has no blocks
            wishes.append(full_stored(self.sim))
        return [search.candidate(wish) for wish in dict.fromkeys(wishes)]

    def solve(self, budget: int, seconds: float | None = None) -> Candidate:
        """The best plan found whose simulated peak is within ``budget`` bytes.

        Args:
            budget: bytes.
            seconds: about how long to search, once there is a plan that fits; ``None`` for half a minute.

        Raises:
            BudgetError: none is.
        """
        self.effort.renew(_EFFORT if seconds is None else min(_EFFORT, seconds * A_SECOND))
        baselines = self.baselines()
        if baselines[0].simulation.peak_bytes <= budget:
            return baselines[0]
        if self.relaxation.least_peak > budget:  # which is no bound where backward runs more than once
            best = self.smallest if self.smallest.simulation.peak_bytes <= budget else None
        elif every := self.search.everything:
            best = self._better(None, [*baselines, *every], budget)
        else:
            best = self._searched(baselines, budget)
        if best is None:
            raise refusal(self.sim, self.smallest.simulation, budget)
        self._found_before.append(best)  # a larger budget is never slower
        return min((c for c in self._found_before if c.simulation.peak_bytes <= budget), key=lambda c: c.key)

    def ended_early(self, best: Candidate, budget: int) -> bool:
        """Whether the latest search, which found ``best``, was given less than it could have used."""
        return self.effort.over and self.effort.limit < _EFFORT and self._far(best, budget, _GOOD_GAP)

    def _searched(self, baselines: list[Candidate], budget: int) -> Candidate | None:
        """The best plan of a step that is too large to try all plans: stage after stage, until one is close
        enough to the bound or enough was simulated.
        """
        best, enough = None, 0.0
        for rounds, enough in self._stages(baselines, budget):
            vain = 0
            for found in rounds:
                better = self._better(best, found, budget)
                vain, best = vain + 1 if better is best else 0, better
                if vain == _VAIN or self.effort.over or not self._far(best, budget, _GOOD_GAP):
                    break
            if self.effort.over or not self._far(best, budget, enough):
                break
        if best is None or (not self.effort.over and self._far(best, budget, enough)):
            best = self._better(best, [self.smallest], budget)
        return best

    def _stages(
        self, baselines: list[Candidate], budget: int
    ) -> Iterator[tuple[Iterable[list[Candidate]], float]]:
        """The search's stages, the cheapest first: rounds of plans, and how close to the bound will do after
        them.
        """
        yield [baselines + self._rounded(budget, windows=False)], _NEAR_GAP
        yield [self._rounded(budget, windows=True)], _NEAR_GAP
        yield [self._whole(budget)], _GOOD_GAP
        current().say("searching")
        yield corrected(self.relaxation, self.search, budget, _CORRECTIONS), _WIDE_GAP
        yield [[c] for c in self._lowered(baselines, budget) if c.simulation.peak_bytes <= budget], _WIDE_GAP

    def _solved(self, budget: int, windows: bool) -> tuple[float, Floats]:
        """The relaxation's answer: seconds that no schedule undercuts, recording aside, and its decisions."""
        key = (budget, windows)
        if key in self._relaxed:
            return self._relaxed[key]
        found = self.relaxation.solve(budget, windows)
        if not self.effort.over:  # else it may have ended early
            self._relaxed[key] = found
        return found

    def _far(self, best: Candidate | None, budget: int, share: float) -> bool:
        """Whether more than ``share`` of the step's time lies between a plan and the bound for ``budget``."""
        if best is None:
            return True
        gap = best.simulation.extra_seconds - self.relaxation.bound(budget).extra_seconds
        return gap > share * self.graph.plain_seconds

    def _better(self, best: Candidate | None, found: list[Candidate], budget: int) -> Candidate | None:
        """The better of ``best`` and the best of ``found`` that fits, with decisions of that exchanged."""
        fitting = [c for c in found if c.simulation.peak_bytes <= budget]
        new = [self.search.faster(min(fitting, key=lambda c: c.key), budget)] if fitting else []
        return min([*([best] if best else []), *new], key=lambda c: c.key, default=None)

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
        found = rounded(self.relaxation, self.search, point) if bound < float("inf") else []
        return self._lowered(found, budget)

    def _whole(self, budget: int) -> list[Candidate]:
        """The plan of the bound's program in whole numbers, which makes its bound sharper, too; with windows
        where they make a difference.
        """
        current().say("comparing with the best possible")
        good = _GOOD_GAP * self.graph.plain_seconds
        more = self._solved(budget, windows=True)[0] - self._solved(budget, windows=False)[0]
        bound, _ = self.relaxation.solve(budget, windows=more > 0.1 * good)
        if bound == float("inf") or len(self.relaxation.program.cost) > _WHOLE_COLUMNS:
            return []
        _, whole = self.relaxation.solve_whole(budget, 0.2 * good / max(bound, good))
        if whole is None:
            return []
        wish = frozenset(v for v, k in self.relaxation.column.items() if whole[k] > 0.5)
        return self._lowered([self.search.candidate(wish)], budget)


@lru_cache(maxsize=2)
def planner_of(graph: StepGraph) -> Planner:
    """The planner of a step: a budget that cannot be met is often followed by another for the same step."""
    return Planner(graph)
