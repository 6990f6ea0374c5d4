"""Gradients that meet: where autograd's engine adds them in place, and a trace saw it make a third tensor.

The engine adds to the first of two gradients when nobody else holds it. It counts references for that, and a
tensor whose storage Python has looked at has one more. So in a traced step it adds out of place. What would
have been in place is known from the events: the first gradient ends with the sum.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lowtide.graph import Event

SUM = "aten.add.Tensor"


def in_place(
    events: list[Event],
    operations: list[dict[str, Any]],
    storages: list[dict[str, Any]],
    values: list[dict[str, Any]],
    sums: Collection[int],
) -> list[Event]:
    """The events with such sums in place; operations, storages and values are changed to agree.

    Args:
        events, operations, storages, values: as `lowtide.trace.eager.StepTracer` takes them down.
        sums: indices of the additions that the engine made between nodes.
    """
    place_of = {
        event.index: place for place, event in enumerate(events) if event.kind == "op" and event.index in sums
    }
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
    changed: list[Event] = []
    for place, event in enumerate(events):
        if place in dropped:
            if event.index in merged:  # a sum that was added to: it takes no bytes of its own
                changed.append(event)
            continue
        changed.append(
            Event("free", root(event.index)) if event.kind == "free" and event.index in merged else event
        )
        if event.kind == "free" and event.index in merged:
            changed.append(event)
    return changed


def _until_next_operation(events: list[Event], place: int) -> range:
    last = place + 1
    while last < len(events) and events[last].kind != "op":
        last += 1
    return range(place + 1, last)
