"""What other budgets would cost: the least extra time that is found for each, and the least that is
possible."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan.search import search_of

POINTS = 10
ENOUGH_SECONDS = 4.0
"""No further budget is begun after this long: small budgets of large models take long to plan for."""


@dataclass(frozen=True)
class Point:
    """The plan for one budget.

    Attributes:
        peak_bytes: its peak.
        extra_seconds: what it adds to the step, forecast.
        bound_seconds: no schedule of the same operations with that peak adds less.
    """

    peak_bytes: int
    extra_seconds: float
    bound_seconds: float


def tradeoff(graph: StepGraph, points: int = POINTS, seconds: float = ENOUGH_SECONDS) -> tuple[Point, ...]:
    """Plans by recomputation for budgets from the plain step's peak down to the smallest that works.

    Args:
        graph: the step.
        points: how many budgets.
        seconds: after this long no further budget is begun. The smallest one is the first, then the others as
            they part what lies between.

    Returns:
        The plans that were found, the largest peak first; none is both larger and slower than another.
    """
    search = search_of(graph)
    with search.lock:
        high, low = search.sim.plain_peak, search.relaxation.least_peak
        found = [Point(high, 0.0, 0.0)]
        began = time.perf_counter()
        for k in _parting(points - 1):
            try:
                best = search.solve(high - (high - low) * k // (points - 1)).simulation
            except BudgetError:  # below the smallest, which it has searched for
                best = search.smallest.simulation
            bound = search.relaxation.bound(best.peak_bytes).extra_seconds
            found.append(Point(best.peak_bytes, best.extra_seconds, min(bound, best.extra_seconds)))
            if time.perf_counter() - began > seconds:
                break
    return _front(found)


def _parting(last: int) -> list[int]:
    """The numbers from 1 to ``last``, the last first, then those that part what lies between in halves.

    >>> _parting(8)
    [8, 4, 2, 6, 1, 3, 5, 7]
    """
    found, spans = [last] if last > 0 else [], [(0, last)]
    for low, high in spans:  # which grows
        if high - low > 1:
            found.append((low + high) // 2)
            spans += [(low, found[-1]), (found[-1], high)]
    return found


def _front(points: list[Point]) -> tuple[Point, ...]:
    """The points that no other one beats in peak and time, the largest peak first."""
    front: list[Point] = []
    for point in sorted(set(points), key=lambda point: (point.peak_bytes, point.extra_seconds)):
        if not front or point.extra_seconds < front[-1].extra_seconds:
            front.append(point)
    return tuple(reversed(front))
