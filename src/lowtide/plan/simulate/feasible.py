"""What can be given up at all: which operations may run again, and the smallest feasible set of stored values
around a wish.
"""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.graph import StepGraph
from lowtide.plan.simulate.simulator import Simulator


def feasible_replays(sim: Simulator) -> list[bool]:
    """Per operation: whether it can run again when everything that can be stored is stored."""
    if not sim.feasible:
        for op in sim.graph.operations:
            sim.feasible.append(op.replayable and all(_available(sim, sim.feasible, u) for u in op.reads))
    return sim.feasible


def _available(sim: Simulator, feasible: list[bool], value: int) -> bool:
    v = sim.graph.values[value]
    if v.storable:
        return True
    return not v.must_store and v.producer is not None and v.producer < len(feasible) and feasible[v.producer]


def _must(sim: Simulator) -> bytearray:
    """Per value: whether it stays wherever it is needed, for nothing may bring it back."""
    must = sim.reach.must
    if not must:
        feasible = feasible_replays(sim)
        must.extend(v.must_store or v.producer is None or not feasible[v.producer] for v in sim.graph.values)
    return must


def close(graph: StepGraph, stored: Iterable[int], simulator: Simulator | None = None) -> frozenset[int]:
    """The smallest feasible set of stored values that includes what ``stored`` keeps.

    Values that replays would need but that cannot be brought back (their operation is not replayable, or they
    lie beyond a value that must be stored) are added; values that neither backward nor a replay reads are
    left out. What a checkpointing scope asked to be given up is not kept where it can come back.
    """
    sim = simulator or Simulator(graph)
    producer, storable = sim.producer, sim.reach.storable
    must = _must(sim)
    kept = set(stored).difference(sim.reach.forced)
    kept.update(v for v in sim.droppable if must[v])
    kept.update(
        earlier
        for v, companions in sim.companions.items()
        if v in kept and v in sim.saved_of
        for earlier in companions
    )
    used = {v for v in kept if v in sim.saved_of}
    used = sim.reach.close(kept, used, [v for v in sim.droppable if v not in kept], must)
    return frozenset(v for v in used if producer[v] >= 0 and (storable[v] or v in sim.saved_of))
