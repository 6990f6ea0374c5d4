"""The plan with the smallest peak, found from a step's bytes alone.

In: a `Simulator` and its `Stages`. Out: the values that stay. Measured seconds differ from process to
process, and a search that they lead ends at another plan each time; the smallest budget that a refusal names
has to be met by whoever asks for it, in another process, too. So here an operation costs as many "seconds" as
it reads and writes bytes: the stages are searched with that, the path of least memory is taken and corrected
by exact simulations, and single decisions of the best plans are changed where the peak stands for as long as
that lowers it. Nothing here looks at a clock or at a measured second.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

from lowtide.plan.search.local import Candidate, LocalSearch
from lowtide.plan.search.path import PathSearch
from lowtide.plan.simulate.feasible import close
from lowtide.plan.simulate.simulator import Simulator
from lowtide.plan.split.stages import Stages

_CORRECTIONS = 4
"""Times that the exact simulation corrects what the stages say of the path of least memory."""

_LOWERED = 4
"""Plans whose single decisions are changed, the lowest ones."""

_OVERHEAD_BYTES = 4096
"""What one more operation costs, in the bytes that could be read or written meanwhile."""


def priced(sim: Simulator) -> Simulator:
    """The same simulator for a step whose operations take as many seconds as they touch bytes."""
    graph = sim.graph
    prices = [sum(sim.value_bytes[v] for v in {*op.reads, *op.writes}) for op in graph.operations]
    operations = tuple(
        replace(op, seconds=float(price)) for op, price in zip(graph.operations, prices, strict=True)
    )
    twin = copy.copy(sim)
    twin.graph = replace(
        graph,
        operations=operations,
        plain_seconds=0.0,
        overhead_seconds=0.0,
        replay_overhead_seconds=float(_OVERHEAD_BYTES),
    )
    twin.operations = operations
    return twin


def minimum_peak(
    sim: Simulator, stages: Stages, start: Callable[[LocalSearch], list[Candidate]]
) -> frozenset[int]:
    """The values that stay in the plan with the smallest peak that is found; ``start`` gives plans that are
    known without a search.
    """
    search = LocalSearch(priced(sim))
    found = [*start(search), *search.everything()]
    if not search.everything():
        found += [search.candidate(stored) for stored in _lightest(PathSearch(search.sim, stages))]
    lowest = sorted({c.stored: c for c in found}.values(), key=lambda c: c.height)[:_LOWERED]
    return min((search.lower(c) for c in lowest), key=lambda c: c.height).stored


def _lightest(paths: PathSearch) -> Iterator[frozenset[int]]:
    """What paths of least memory store, each corrected by the exact simulation of the one before."""
    sim = paths.sim
    seen: set[frozenset[int]] = set()
    for _ in range(_CORRECTIONS):
        _, path = paths.least()
        stored = close(sim.graph, paths.stored(path), sim)
        if stored in seen:
            break
        seen.add(stored)
        yield stored
        paths.correct(path, sim.simulate(stored).top_bytes)
