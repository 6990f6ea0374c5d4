"""Gradients that stand before a step, as they do from the second micro-step of an accumulation on."""

from __future__ import annotations

from dataclasses import replace

from lowtide.graph import Event, StepGraph


def with_standing_gradients(graph: StepGraph) -> StepGraph:
    """The step that ``graph`` shows, when the gradients that it made stood before it: what it makes now is
    added to them and ends at once.

    Gradients are the storages of the step's own that have a parameter's name.
    """
    made = {
        storage.id: storage.bytes
        for storage in graph.storages
        if storage.name and storage.producer is not None
    }
    ended = {event.index for event in graph.events if event.kind == "free"}
    last: dict[int, int] = {}
    for place, event in enumerate(graph.events):
        if event.kind == "op":
            operation = graph.operations[event.index]
            for value in (*operation.reads, *operation.writes):
                storage = graph.values[value].storage
                if storage in made and storage not in ended:
                    last[storage] = place
    after: dict[int, list[Event]] = {}
    for storage, place in last.items():
        after.setdefault(place, []).append(Event("free", storage))
    events = tuple(new for place, event in enumerate(graph.events) for new in (event, *after.get(place, ())))
    return replace(graph, events=events, resident_bytes=graph.resident_bytes + sum(made.values()))
