"""Plans from the bound's program, each corrected by the exact simulation of the one before.

The program of `lowtide.plan.bound` leaves out most of what replays hold while backward runs. So its decisions
are rounded and simulated, and the bytes held at each moment beyond those that the program counts there are
taken off that moment's budget when it is asked again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lowtide.plan.bound.program import Floats
from lowtide.plan.bound.relaxation import Relaxation
from lowtide.plan.search.local import Candidate, LocalSearch

_THRESHOLDS = (0.5, 0.99, 0.1)
"""Shares of a value, in the relaxed decisions, above which it is stored."""


def rounded(relaxation: Relaxation, search: LocalSearch, point: Floats) -> list[Candidate]:
    """Plans that store what relaxed decisions mostly store."""
    wishes = [frozenset(v for v, k in relaxation.column.items() if point[k] > least) for least in _THRESHOLDS]
    return [search.candidate(wish) for wish in dict.fromkeys(wishes)]


def corrected(
    relaxation: Relaxation, search: LocalSearch, budget: int, rounds: int
) -> Iterator[list[Candidate]]:
    """Rounded plans for ``budget`` bytes, round after round; none where nothing fits."""
    beside = np.zeros(len(relaxation.fixed), dtype=np.int64)
    for number in range(rounds):
        seconds, point = relaxation.solve_beside(budget, beside) if number else relaxation.solve(budget)
        if seconds == float("inf"):
            if not number:
                return
            beside //= 2
            continue
        found = rounded(relaxation, search, point)
        low = search.lower(min(found, key=lambda c: c.height), budget)
        yield [*found, low]
        point = relaxation.point_of(low.stored, low.simulation.replayed)
        counted = relaxation.fixed + relaxation.occupancy(point)
        missed = np.maximum(0, low.simulation.top_bytes - counted).astype(np.int64)
        # halfway: the replays of one answer are not those of the next
        beside = (beside + missed) // 2 if number else missed
