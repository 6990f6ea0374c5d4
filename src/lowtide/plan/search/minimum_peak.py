"""The plan with the smallest peak, found from a step's bytes alone.

In: a `Simulator` and its `Stages`. Out: the values that stay. Measured seconds differ from process to
process, and a search that they lead ends at another plan each time; the smallest budget that a refusal names
has to work in every process. So here an operation costs as many "seconds" as
it reads and writes bytes: budgets between the bound and the lowest plan known are halved, and single
decisions of what their programs store are changed at the peak for as long as that lowers it.
Nothing here looks at a clock or at a measured second.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from lowtide.plan.bound.effort import A_SECOND, Effort
from lowtide.plan.bound.relaxation import Relaxation
from lowtide.plan.search.corrected import corrected
from lowtide.plan.search.local import Candidate, LocalSearch
from lowtide.plan.simulate.simulator import Simulator
from lowtide.plan.split.stages import Stages

_HALVINGS = 2
"""Budgets for which the program is solved."""

_ROUNDS = 8
"""Times that it is solved for each."""

_VAIN = 2
"""Of these, how many in a row may find nothing lower."""

_CLOSE = 0.003
"""How close the budgets get, as a share of the peak."""

_LOWERED = 4
"""Plans whose single decisions are changed, the lowest ones."""

_EFFORT = 3 * A_SECOND
"""What the search may take before what is found has to do."""

_OVERHEAD_BYTES = 4096
"""What one more operation costs, in the bytes that could be read or written meanwhile."""


def priced(sim: Simulator) -> Simulator:
    """The same simulator for a step whose operations take as many seconds as they touch bytes."""
    twin = copy.copy(sim)
    twin.graph = sim.graph.with_operations(
        lambda op: replace(op, seconds=float(sum(sim.value_bytes[v] for v in {*op.reads, *op.writes}))),
        plain_seconds=0.0,
        overhead_seconds=0.0,
        replay_overhead_seconds=float(_OVERHEAD_BYTES),
    )
    twin.operations = twin.graph.operations
    return twin


def minimum_peak(
    sim: Simulator, stages: Stages, start: Callable[[LocalSearch], list[Candidate]]
) -> frozenset[int]:
    """The values that stay in the plan with the smallest peak that is found; ``start`` gives plans that are
    known without a search.
    """
    search = LocalSearch(priced(sim), Effort(_EFFORT))
    found = [*start(search), *search.everything]
    if not search.everything:
        found.append(search.lower(min(found, key=lambda c: c.height)))
        found += _halved(search, stages, found[-1].simulation.peak_bytes)
    lowest = sorted({c.stored: c for c in found}.values(), key=lambda c: c.height)[:_LOWERED]
    return min((search.lower(c) for c in lowest), key=lambda c: c.height).stored


def _halved(search: LocalSearch, stages: Stages, high: int) -> list[Candidate]:
    """The lowest plan for each of a few budgets below ``high``."""
    relaxation = Relaxation(search.sim, stages, effort=search.effort)
    low = relaxation.least_peak
    found: list[Candidate] = []
    for _ in range(_HALVINGS):
        if high - low < _CLOSE * high or search.effort.over:
            break
        middle, best, vain = (low + high) // 2, high, 0
        for plans in corrected(relaxation, search, middle, _ROUNDS):
            found.append(min(plans, key=lambda c: c.height))
            peak = found[-1].simulation.peak_bytes
            best, vain = (peak, 0) if peak < best else (best, vain + 1)
            if best <= middle or vain == _VAIN or search.effort.over:
                break
        if best < high:
            high = max(best, middle)
        else:
            low = middle
    return found
