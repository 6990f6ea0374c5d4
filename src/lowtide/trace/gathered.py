"""Sharded weights in a step graph: each gathered storage is one value that stands before the step.

A program that shards its weights (FSDP2) gathers each into a storage of its own before it is used, frees that
storage's bytes after it, and fills it again with the same bytes in backward. In: a graph as it was written
down, where each gather made another version. Out: the same step with one value for each gathered storage,
which is there wherever that is filled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from lowtide.graph import Event, Operation, StepGraph

_GATHERS = "it gathers a sharded weight"


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
    stand = (s.bytes for s in changed.storages if s.producer is None and s.id not in empty)
    return replace(changed, resident_bytes=sum(stand))
