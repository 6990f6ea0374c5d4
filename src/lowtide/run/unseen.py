"""What a step takes that its trace does not show: a loss outside the model, collectives under way, and the executor's own time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lowtide.graph import Event, Operation, StepGraph, Storage, Value
from lowtide.ops import FUNCTIONAL_COLLECTIVES
from lowtide.plan.simulate import simulate
from lowtide.run.overhead import executor_overhead
from lowtide.trace.eager import OUTSIDE


@dataclass(frozen=True)
class LossMemory:
    """What a loss outside the model takes, above what is live at the forward's end.

    Attributes:
        peak_bytes: at most, between forward and backward.
        live_bytes: when backward reaches the model.
        stored: the stored values of the plan under which it was measured.
    """

    peak_bytes: int
    live_bytes: int
    stored: frozenset[int]


def with_loss(graph: StepGraph, measured: LossMemory) -> StepGraph:
    """The graph with a loss between forward and backward that takes what was measured.

    What it leaves (the gradients of the outputs) is taken to live until the first of the model's saved tensors is released. Outputs that the caller lets
    go of stand until the loss has been through its peak, as far as there was room for them in that: what computes the loss holds them.
    """
    operations = graph.operations
    last = max(
        at
        for at, event in enumerate(graph.events)
        if event.kind == "op" and operations[event.index].phase == "forward" and operations[event.index].reason != OUTSIDE
    )
    place = next((at for at in range(last + 1, len(graph.events)) if graph.events[at].kind == "unpack"), last + 1)
    end = next((at - 1 for at in range(last + 1, place) if graph.events[at].kind == "op"), last)  # the forward has let go of its own
    live = simulate(graph, measured.stored).live_bytes
    left = max(0, measured.live_bytes - int(live[place - 1] - live[end]))
    room = max(0, measured.peak_bytes - measured.live_bytes)
    drops = [(int(live[at - 1] - live[at]), at) for at in range(end + 1, place) if _ends_of_forward(graph, graph.events[at])]
    later: list[int] = []
    for freed, at in sorted(drops):
        if freed <= room:
            later.append(at)
            room -= freed
    index, storage, value = len(graph.operations), len(graph.storages), len(graph.values)
    operation = Operation(
        index=index,
        name="the loss outside the model",
        reads=(),
        writes=(value,),
        phase="backward",
        replayable=False,
        reason="it lies outside the model",
        scratch_bytes=room,
    )
    after = next((at for at in range(place, len(graph.events)) if graph.events[at].kind == "release"), len(graph.events) - 1)
    events = [
        *(event for at, event in enumerate(graph.events[:place]) if at not in later),
        Event("op", index),
        *(graph.events[at] for at in sorted(later)),
        *graph.events[place : after + 1],
        Event("free", storage),
        *graph.events[after + 1 :],
    ]
    return replace(
        graph,
        operations=(*graph.operations, operation),
        storages=(*graph.storages, Storage(storage, left, "backward", index)),
        values=(*graph.values, Value(value, storage, 0, index)),
        events=tuple(events),
    )


def _ends_of_forward(graph: StepGraph, event: Event) -> bool:
    """Whether a tensor that the forward made ends with the event."""
    producer = graph.storages[event.index].producer if event.kind == "free" else None
    return producer is not None and graph.operations[producer].phase == "forward" and graph.operations[producer].reason != OUTSIDE


def overlapped_bytes(graph: StepGraph) -> int:
    """What collectives under way may hold beside the operations that they overlap: a gather and a reduce-scatter at a time.

    A trace shows it where they start; how long it stays is up to the other ranks.
    """
    found: dict[str, int] = {}
    for operation in graph.operations:
        if operation.name in FUNCTIONAL_COLLECTIVES:
            found[operation.name] = max(found.get(operation.name, 0), operation.scratch_bytes)
    return sum(found.values())


def with_overhead(graph: StepGraph) -> StepGraph:
    """The graph with what this executor adds to its operations here."""
    overhead = executor_overhead(torch.device(graph.device).type)
    forward = sum(1 for operation in graph.operations if operation.phase == "forward")
    return replace(graph, overhead_seconds=overhead.passing_seconds * forward, replay_overhead_seconds=overhead.replayed_seconds)
