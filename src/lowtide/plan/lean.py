"""The plan with the smallest peak, found from a step's bytes alone.

In: a `Simulator` and its `Stages`. Out: the values that stay. Measured seconds differ from process to process, and a search that they lead ends at another
plan each time; the smallest budget that a refusal names has to be met by whoever asks for it, in another process, too. So here every
operation costs as many "seconds" as it reads and writes bytes: the stages are searched with these, the path of least memory is taken and
corrected by exact simulations, and single decisions are turned round where the peak stands for as long as that lowers it. Nothing here
looks at a clock or at a measured second.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lowtide.plan.build import feasible_replays
from lowtide.plan.master import Master
from lowtide.plan.search import Candidate, Search
from lowtide.plan.simulate import Simulator
from lowtide.plan.stages import Stages

_CORRECTIONS = 4
"""Times that the exact simulation corrects what the stages say of the path of least memory."""

_TURNS = 240
"""Single decisions that are turned round and simulated."""

_OVERHEAD_BYTES = 4096
"""What one more operation costs, in the bytes that could be read or written meanwhile."""


def priced_by_bytes(sim: Simulator) -> Simulator:
    """The same simulator for a step whose operations take as many seconds as they touch bytes."""
    graph = sim.graph
    operations = tuple(replace(op, seconds=float(sum(sim.value_bytes[v] for v in {*op.reads, *op.writes}))) for op in graph.operations)
    twin = copy.copy(sim)
    twin.graph = replace(
        graph, operations=operations, plain_seconds=0.0, overhead_seconds=0.0, replay_overhead_seconds=float(_OVERHEAD_BYTES)
    )
    twin.operations = operations
    return twin


def leanest(sim: Simulator, stages: Stages, effort: int, start: Callable[[Search], list[Candidate]]) -> frozenset[int]:
    """The values that stay in the plan with the smallest peak that is found; ``start`` gives plans that are known without a search."""
    priced = priced_by_bytes(sim)
    search = Search(priced)
    master = Master(priced, stages, feasible_replays(priced), effort)
    found = [*start(search), *search.everything()]
    for _ in range(_CORRECTIONS):
        _, path = master.least()
        candidate = search.candidate(master.stored(path))
        seen = any(candidate.stored == other.stored for other in found)
        found.append(candidate)
        if seen:
            break
        master.correct(path, candidate.simulation.top_bytes)
    best = min(found, key=_height)
    return (best if search.everything() else lowered(search, best)).stored


def _height(candidate: Candidate) -> tuple[int, int, float]:
    """How high a plan reaches, at how many moments, and what it costs."""
    simulation = candidate.simulation
    return (simulation.peak_bytes, int(np.count_nonzero(simulation.top_bytes == simulation.peak_bytes)), simulation.extra_seconds)


def lowered(search: Search, best: Candidate) -> Candidate:
    """``best`` after single decisions were turned round at its peak, each of which made it lower, or as high at fewer moments."""
    tried: set[frozenset[int]] = {best.stored}
    turns = _TURNS
    improved = True
    while improved:
        improved = False
        for stored in _turned(search, best):
            if turns <= 0:
                return best
            if stored in tried:
                continue
            tried.add(stored)
            turns -= 1
            other = search.candidate(stored)
            if _height(other) < _height(best):
                best, improved = other, True
                break
    return best


def _turned(search: Search, best: Candidate) -> list[frozenset[int]]:
    """Sets of stored values that differ in one decision that matters at the peak, what takes most bytes there first."""
    sim, graph = search.sim, search.sim.graph
    at = best.simulation.peak_event
    moves: list[tuple[int, int, frozenset[int]]] = []
    for v in best.stored:
        sid = sim.storage_of[v]
        until = best.simulation.held_until.get(sid)
        if until is not None and sim.natural_end[sid] <= at < until:
            moves.append((-sim.value_bytes[v], v, best.stored - {v}))
    for index in best.simulation.replayed:
        outputs = [w for w in graph.operations[index].writes if graph.values[w].storable and w not in best.stored]
        outputs += [earlier for w in outputs for earlier in sim.companions.get(w, ())]
        if outputs:
            size = sum(sim.value_bytes[w] for w in outputs)
            moves.append((size, graph.operations[index].writes[0], best.stored.union(outputs)))
    return [stored for _, _, stored in sorted(moves, key=lambda move: move[:2])]
