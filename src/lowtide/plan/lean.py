"""The plan with the smallest peak, found from a step's bytes alone.

In: a `Simulator` and its `Stages`. Out: the values that stay. Measured seconds differ from process to
process, and a search that they lead ends at another plan each time; the smallest budget that a refusal names
has to be met by whoever asks for it, in another process, too. So here an operation costs as many "seconds" as
it reads and writes bytes, and in a second search all operations cost the same: the stages are searched with
these, the path of least memory is taken and corrected by exact simulations, and single decisions of the
better plan are turned round where the peak stands for as long as that lowers it. Nothing here looks at a
clock or at a measured second.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from lowtide.plan.feasible import close, feasible_replays
from lowtide.plan.front import Known
from lowtide.plan.master import Master
from lowtide.plan.search import Candidate, Search
from lowtide.plan.simulate import Simulator
from lowtide.plan.stages import Stages

_CORRECTIONS = 4
"""Times that the exact simulation corrects what the stages say of the path of least memory."""

_TURNS = 60
"""Single decisions that are turned round and simulated in vain before that ends."""

_OVERHEAD_BYTES = 4096
"""What one more operation costs, in the bytes that could be read or written meanwhile."""


def priced(sim: Simulator, alike: bool) -> Simulator:
    """The same simulator for a step whose operations take as many seconds as they touch bytes, or each the
    same time when ``alike``.
    """
    graph = sim.graph
    prices = [
        0 if alike else sum(sim.value_bytes[v] for v in {*op.reads, *op.writes}) for op in graph.operations
    ]
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


def leanest(
    sim: Simulator, stages: Stages, effort: int, start: Callable[[Search], list[Candidate]], known: Known
) -> frozenset[int]:
    """The values that stay in the plan with the smallest peak that is found; ``start`` gives plans that are
    known without a search, and ``known`` holds what earlier searches of its stages found."""
    search = Search(priced(sim, alike=False))
    every = search.everything()
    if every:
        return min([*start(search), *every], key=_height).stored
    found = start(search)
    for alike in (False, True):
        found += [
            search.candidate(stored)
            for stored in _paths(Master(priced(sim, alike), stages, feasible_replays(sim), effort, known))
        ]
    return lowered(search, min(found, key=_height)).stored


def _paths(master: Master) -> Iterator[frozenset[int]]:
    """What paths of least memory store, each corrected by the exact simulation of the one before."""
    sim = master.sim
    seen: set[frozenset[int]] = set()
    for _ in range(_CORRECTIONS):
        _, path = master.least()
        stored = close(sim.graph, master.stored(path), sim)
        if stored in seen:
            break
        seen.add(stored)
        yield stored
        master.correct(path, sim.simulate(stored).top_bytes)


def _height(candidate: Candidate) -> tuple[int, int]:
    """How high a plan reaches, and at how many moments."""
    simulation = candidate.simulation
    return (simulation.peak_bytes, int(np.count_nonzero(simulation.top_bytes == simulation.peak_bytes)))


def lowered(search: Search, best: Candidate, budget: int = 0) -> Candidate:
    """``best`` after single decisions were turned round at its peak, each of which made it lower, or as high
    at fewer moments, until it fits.
    """
    tried: set[frozenset[int]] = {best.stored}
    turns = _TURNS
    improved = True
    while improved and best.simulation.peak_bytes > budget:
        improved = False
        peak, at = best.simulation.peak_bytes, best.simulation.peak_event
        for stored in _turned(search, best, budget):
            if turns <= 0:
                return best
            closed = close(search.sim.graph, stored, search.sim)
            if closed in tried:
                continue
            tried.add(closed)
            if search.sim.least_at(closed, at) >= peak:
                continue
            turns -= 1
            other = Candidate(closed, search.sim.simulate(closed))
            if _height(other) < _height(best):
                best, improved, turns = other, True, _TURNS
                break
    return best


def _turned(search: Search, best: Candidate, budget: int) -> Iterator[frozenset[int]]:
    """Sets of stored values that differ in one decision that may matter at the peak. First those that give up
    what stands there: what suffices and costs least, then what takes most bytes. Then those that store what
    is replayed, the smallest first."""
    sim, graph = search.sim, search.sim.graph
    at = best.simulation.peak_event
    over = best.simulation.peak_bytes - budget
    given: list[tuple[bool, float, int]] = []
    for v in best.stored:
        sid = sim.storage_of[v]
        until = best.simulation.held_until.get(sid)
        if until is not None and sim.natural_end[sid] <= at < until:
            size = sim.value_bytes[v]
            given.append(
                (size < over, graph.operations[sim.producer[v]].seconds if size >= over else -size, v)
            )
    for _, _, v in sorted(given):
        yield best.stored - {v}
    kept: list[tuple[int, int, list[int]]] = []
    for index in best.simulation.replayed:
        outputs = [
            w for w in graph.operations[index].writes if graph.values[w].storable and w not in best.stored
        ]
        outputs += [earlier for w in outputs for earlier in sim.companions.get(w, ())]
        if outputs:
            kept.append(
                (sum(sim.value_bytes[w] for w in outputs), graph.operations[index].writes[0], outputs)
            )
    for _, _, outputs in sorted(kept):
        yield best.stored.union(outputs)
