"""Where a plain step would have the ends of what a real step holds longer or hands out unseen.

In a trace on real tensors the executor or autograd held what they saved, so a storage's end says nothing; and a tensor that is handed back to
backward shares its storage with the program's, so the end of backward's hold on it is not seen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lowtide.graph import Event


def settled(
    events: Sequence[Event],
    operations: Sequence[dict[str, Any]],
    values: Sequence[dict[str, Any]],
    saved: Sequence[dict[str, Any]],
    storages: Sequence[dict[str, Any]],
    outputs: Collection[int],
) -> list[Event]:
    """The events of a real trace with such ends moved. The program itself is taken to need what the forward made until the last forward operation
    that touches it.

    Args:
        events, operations, values, saved, storages: as `lowtide.trace.eager.Tracer` takes them down.
        outputs: storages that the step's caller may hold.
    """
    last: dict[int, int] = {}
    freed_in_forward: set[int] = set()
    for place, event in enumerate(events):
        if event.kind == "op":
            operation = operations[event.index]
            if operation["phase"] == "backward":
                break
            for value in (*operation["reads"], *operation["writes"]):
                last[values[value]["storage"]] = place
        elif event.kind == "pack":
            last[values[saved[event.index]["value"]]["storage"]] = place
        elif event.kind == "free":
            freed_in_forward.add(event.index)
    early = {
        number: place
        for number, place in last.items()
        if number not in freed_in_forward and number not in outputs and storages[number]["producer"] is not None
    }
    after: dict[int, list[Event]] = {}
    for number, place in early.items():
        after.setdefault(place, []).append(Event("free", number))
    freed = [
        new
        for place, event in enumerate(events)
        if not (event.kind == "free" and event.index in early)
        for new in (event, *after.get(place, []))
    ]
    return _handed_back(freed, operations, saved)


def _handed_back(events: list[Event], operations: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> list[Event]:
    """A backward node holds what it was handed until it has run: until its saved tensors are released, or where the graph is kept, until the
    last of its operations that reads the value. The node's operations end where another one asks for its tensors."""
    moved: dict[int, list[Event]] = {}  # place -> what ends right before it
    gone: set[int] = set()
    for place, event in enumerate(events):
        if event.kind != "unpack" or place + 1 == len(events) or events[place + 1] != Event("done", event.index):
            continue
        value, ran, until = saved[event.index]["value"], False, 0
        for at in range(place + 2, len(events)):
            other = events[at]
            if other == Event("release", event.index):
                until = at
                break
            if other.kind == "unpack" and (ran or other.index == event.index):
                break
            if other.kind == "op":
                ran = True
                if value in operations[other.index]["reads"]:
                    until = at + 1
        if until:
            gone.add(place + 1)
            moved.setdefault(until, []).append(events[place + 1])
    result: list[Event] = []
    for place, event in enumerate(events):
        result += moved.get(place, [])
        if place not in gone:
            result.append(event)
    return result + moved.get(len(events), [])
