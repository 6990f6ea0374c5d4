"""From a recorded step to the step as it runs: `StepGraph` -> `StepGraph`.

Sharded weights: FSDP2 gathers each into a storage of its own before it is used, frees that storage's bytes
after it, and fills it again with the same bytes in backward. As it was written down, each gather made another
version. `with_gathered` gives each gathered storage one value that exists before the step, and is there
wherever that storage is filled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from lowtide.graph import Event, Operation, StepGraph
from lowtide.ops import FUNCTIONAL_COLLECTIVES, IS_COLLECTIVE

_GATHERS = "it gathers a sharded weight"


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


def _read(op: Operation, index: int, shown: Mapping[int, int], gathers: bool) -> Operation:
    """The operation at another place, with what it reads as it is shown."""
    reads = tuple(dict.fromkeys(shown[u] for u in op.reads))
    if gathers and op.replayable:
        return replace(op, index=index, reads=reads, replayable=False, reason=_GATHERS)
    return replace(op, index=index, reads=reads)


def with_gathered(graph: StepGraph, gathered: Collection[int]) -> StepGraph:
    """The same step with these storages marked as gathered.

    A first step allocates them. No later one does, so the operations that did are left out.

    Args:
        graph: the step, as it was written down.
        gathered: ids of the storages.
    """
    first: dict[int, int] = {}
    for value in graph.values:
        if value.storage in gathered:
            first.setdefault(value.storage, value.id)
    shown = {v.id: first[v.storage] if v.storage in gathered else v.id for v in graph.values}
    allocated = {sid: made for sid in gathered if (made := graph.storages[sid].producer) is not None}
    left_out = set(allocated.values())
    left = [op for op in graph.operations if op.index not in left_out]
    number: dict[int | None, int | None] = {None: None, **{op.index: at for at, op in enumerate(left)}}

    def events() -> Iterable[Event]:
        for event in graph.events:
            if event.kind != "op":
                if not (event.kind == "free" and event.index in gathered):
                    yield event
            elif event.index in left_out:
                yield from (Event("fill", sid) for sid, made in allocated.items() if made == event.index)
            else:
                yield Event("op", number[event.index] or 0)

    changed = replace(
        graph,
        operations=tuple(
            _read(op, at, shown, any(graph.values[w].storage in gathered for w in op.writes))
            for at, op in enumerate(left)
        ),
        storages=tuple(
            replace(s, kind="gathered", producer=None)
            if s.id in gathered
            else replace(s, producer=number[s.producer])
            for s in graph.storages
        ),
        values=tuple(
            replace(v, producer=None, storable=True)
            if first.get(v.storage) == v.id
            else replace(v, producer=number[v.producer], storable=v.storable and v.storage not in gathered)
            for v in graph.values
        ),
        saved=tuple(
            replace(s, value=shown[s.value], droppable=False, forced=False)
            if graph.values[s.value].storage in gathered
            else s
            for s in graph.saved
        ),
        events=tuple(events()),
    )
    empty = changed.begin_empty
    existing = (s.bytes for s in changed.storages if s.producer is None and s.id not in empty)
    return replace(changed, resident_bytes=sum(existing))
