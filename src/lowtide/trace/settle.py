"""What a recorded step says that a plain one, or the next, would not: three corrections.

Gradients that meet: autograd's engine adds to the first of two when nobody else holds it. It counts
references for that, and a tensor whose storage Python has looked at has one more, so in a traced step it adds
out of place. What would have been in place is known from the events: the first gradient ends with the sum.

State that the step has overwritten is overwritten again by the next forward, so nothing that reads it is run
again. Collectives can be, where all ranks do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lowtide.graph import Event, StepGraph
from lowtide.ops import FUNCTIONAL_COLLECTIVES, IS_COLLECTIVE

SUM = "aten.add.Tensor"
UNSETTLED = (
    "it reads state that the step has overwritten, and that another forward before backward overwrites again"
)
"""Why such an operation is not replayable."""


def in_place(
    events: list[Event],
    operations: list[dict[str, Any]],
    storages: list[dict[str, Any]],
    values: list[dict[str, Any]],
    sums: Collection[int],
) -> list[Event]:
    """The events with such sums in place; operations, storages and values are changed to agree.

    Args:
        events, operations, storages, values: as `lowtide.trace.tracer.Tracer` takes them down.
        sums: indices of the additions that the engine made between nodes.
    """
    place_of = {
        event.index: place for place, event in enumerate(events) if event.kind == "op" and event.index in sums
    }
    versions: dict[int, int] = {}
    merged: dict[int, int] = {}  # storage of a sum -> the storage that it is written into

    def root(storage: int) -> int:
        while storage in merged:
            storage = merged[storage]
        return storage

    dropped: set[int] = set()
    for index in sorted(place_of, key=place_of.__getitem__):
        operation = operations[index]
        if operation["name"] != SUM or not operation["reads"] or len(operation["writes"]) != 1:
            continue
        first, result = values[operation["reads"][0]]["storage"], values[operation["writes"][0]]["storage"]
        place = place_of[index]
        ends = next(
            (at for at in _until_next_operation(events, place) if events[at] == Event("free", first)), None
        )
        alike = (
            storages[root(first)]["bytes"] == storages[result]["bytes"]
            and storages[first]["kind"] == "backward"
        )
        if ends is None or not alike:
            continue
        dropped.add(ends)
        merged[result] = first
        operation["name"] = "aten.add_.Tensor"
        storages[result]["bytes"] = 0
        name, storages[result]["name"] = storages[result]["name"], ""
        storages[root(first)]["name"] = name or storages[root(first)]["name"]
    for value in values:
        if value["storage"] in merged:
            into = value["storage"] = root(value["storage"])
            versions[into] = value["version"] = versions.get(into, 0) + 1
    return [
        Event("free", root(event.index)) if event.kind == "free" else event
        for place, event in enumerate(events)
        if place not in dropped
    ]


def _until_next_operation(events: list[Event], place: int) -> range:
    last = place + 1
    while last < len(events) and events[last].kind != "op":
        last += 1
    return range(place + 1, last)


def settled_operations(
    operations: Sequence[dict[str, Any]],
    values: Sequence[dict[str, Any]],
    saved: Sequence[dict[str, Any]],
    storages: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """The operations of a trace, where none is replayable that reads what the forward wrote into a tensor
    that was there before (the vectors of a spectral norm, a counter).

    Two forwards may come before one backward (a discriminator's): a replay of the first would find what the
    second wrote. Where autograd itself saved such a value, it allows no second forward, and replays may go on
    from it.

    Args:
        operations, values, saved, storages: as `lowtide.trace.tracer.Tracer` takes them down.
    """
    kept = {item["value"] for item in saved}
    unsettled = {
        value["id"]
        for value in values
        if value["version"]
        and storages[value["storage"]]["producer"] is None
        and operations[value["producer"]]["phase"] == "forward"
        and value["id"] not in kept
    }
    for operation in operations:
        if operation["replayable"] and not unsettled.isdisjoint(operation["reads"]):
            operation = {**operation, "replayable": False, "reason": UNSETTLED}
        yield operation


def with_collectives(graph: StepGraph) -> StepGraph:
    """The graph with its functional collectives replayable, as they are where all ranks run them again."""
    if any(operation.name.startswith("_c10d_functional.wait_tensor") for operation in graph.operations):
        return graph  # someone else's, which a trace shows as an operation and a run does not
    operations = tuple(
        replace(operation, replayable=True, reason="")
        if operation.name in FUNCTIONAL_COLLECTIVES
        and operation.phase == "forward"
        and operation.reason == IS_COLLECTIVE
        else operation
        for operation in graph.operations
    )
    return replace(graph, operations=operations)
