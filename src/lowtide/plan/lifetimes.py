"""When every storage of a step is born and dies under a plan: what `lowtide.layout` lays out."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from lowtide.graph import StepGraph
from lowtide.plan.simulate import Simulator


class Lifetimes(NamedTuple):
    """Half-open lifetimes in events of the step.

    Attributes:
        storage: ids of the storages that the step allocates.
        lower, upper: the event that allocates each, and the first event at which it is gone.
        size: bytes.
    """

    storage: list[int]
    lower: list[int]
    upper: list[int]
    size: list[int]


def lifetimes(graph: StepGraph, stored: Collection[int] | None = None) -> Lifetimes:
    """The lifetimes of what ``graph`` allocates when the values ``stored`` stay (``None``: all that autograd
    saves, the plain step).

    What replays allocate is not among them: it comes and goes within an unpack.
    """
    sim = Simulator(graph)
    held = sim.simulate(sim.droppable if stored is None else stored).held_until
    found = Lifetimes([], [], [], [])
    for storage in graph.storages:
        if storage.producer is None or not storage.bytes:
            continue
        end = max(sim.natural_end[storage.id], held.get(storage.id, 0))
        found.storage.append(storage.id)
        found.lower.append(sim.op_event[storage.producer])
        found.upper.append(min(end + 1, sim.end) if end < sim.end else sim.end)
        found.size.append(storage.bytes)
    return found
