"""From a recorded step to the step as it runs: `StepGraph` -> `StepGraph`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lowtide.graph import Event, Operation, StepGraph
from lowtide.ops import FUNCTIONAL_COLLECTIVES, IS_COLLECTIVE


def in_place(graph: StepGraph, meetings: Collection[int]) -> StepGraph:
    """The step as it runs when nobody records it: where gradients of two nodes meet, the engine writes their
    sum into the first, if that ends with the sum.

    The engine counts references for that, and a tensor whose storage Python has looked at has one more, so
    while a step is recorded the engine adds out of place, and the first gradient ends at once.

    Args:
        graph: the recorded step.
        meetings: the operations in which the engine added gradients.
    """
    operations, storages, values = list(graph.operations), list(graph.storages), list(graph.values)
    events: list[Event] = []
    placed: dict[int, tuple[int, int]] = {}  # of a sum's storage: where it lies now, as which version
    newest = -1  # operation

    def now_in(storage: int) -> int:
        return placed[storage][0] if storage in placed else storage

    for event in graph.events:
        if event.kind == "op":
            newest = event.index
        elif event.kind == "free":
            storage = now_in(event.index)
            if newest in meetings and storages[storage].kind == "backward":
                operation = operations[newest]
                first, result = values[operation.reads[0]], values[operation.writes[0]]
                own, ended = storages[result.storage], storages[storage]
                if now_in(first.storage) == storage and own.bytes == ended.bytes:
                    operations[newest] = replace(operation, name="aten.add_.Tensor", blocks=())
                    earlier = placed[first.storage][1] if first.storage in placed else 0
                    placed[own.id] = storage, earlier + first.version + 1
                    storages[own.id] = replace(own, bytes=0, name="")
                    storages[storage] = replace(ended, name=own.name or ended.name)
                    newest = -1
                    continue
            event = Event("free", storage)
        events.append(event)
    for number, value in enumerate(values):
        if value.storage in placed:
            storage, version = placed[value.storage]
            values[number] = replace(value, storage=storage, version=version + value.version)
    return replace(
        graph,
        operations=tuple(operations),
        storages=tuple(storages),
        values=tuple(values),
        events=tuple(events),
    )


def with_collectives(graph: StepGraph) -> StepGraph:
    """The graph with its functional collectives replayable, as they are where all ranks run them again."""
    if any(operation.name.startswith("_c10d_functional.wait_tensor") for operation in graph.operations):
        return graph  # someone else's, which a trace shows as an operation and a run does not

    def together(op: Operation) -> Operation:
        known = op.name in FUNCTIONAL_COLLECTIVES and op.reason == IS_COLLECTIVE
        return replace(op, replayable=True, reason="") if known and op.phase == "forward" else op

    return graph.with_operations(together)
