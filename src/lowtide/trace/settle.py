"""Where storages end in a trace on real tensors, in which an executor or autograd held what they saved."""

from __future__ import annotations

from typing import Any

from lowtide.graph import Event


def natural_ends(
    events: list[Event],
    operations: list[dict[str, Any]],
    storages: list[dict[str, Any]],
    values: list[dict[str, Any]],
    saved: list[dict[str, Any]],
    outputs: set[int],
) -> list[Event]:
    """The events with the ends of storages where a plain step would have them.

    The program itself is taken to need a storage until the last forward operation that touches it.

    Args:
        events, operations, storages, values, saved: as recorded.
        outputs: storages that the step's caller can hold on to, which end where they did.
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
    return [
        new
        for place, event in enumerate(events)
        if not (event.kind == "free" and event.index in early)
        for new in (event, *after.get(place, []))
    ]
