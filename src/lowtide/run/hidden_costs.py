"""Bytes and seconds of a step that its graph does not show.

These are the random states of checkpoints, the executor's own time, and the gradients that earlier steps
left.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lowtide.graph import Event, StepGraph
from lowtide.native import BuildError, compiler


def checkpoint_bytes(graph: StepGraph, checkpoints: int) -> int:
    """Bytes that so many calls of ``torch.utils.checkpoint`` hold from forward to backward beside their
    inputs: each the CPU's random state, in a tensor that no operation makes.
    """
    if torch.device(graph.device).type != "cpu":
        return 0
    return checkpoints * torch.default_generator.get_state().nbytes


def with_overhead(graph: StepGraph) -> StepGraph:
    """The graph with the time that the executor adds to its operations.

    A GPU runs behind the host: only the part of the host's time that is longer than the operation counts.
    """
    passing, replayed = _overhead_seconds()
    behind = torch.device(graph.device).type != "cpu"
    hidden = [op.seconds if behind else 0.0 for op in graph.operations if op.phase == "forward"]
    return replace(
        graph,
        overhead_seconds=sum(max(0.0, passing - seconds) for seconds in hidden),
        replay_overhead_seconds=sum(max(0.0, replayed - seconds) for seconds in hidden) / max(1, len(hidden)),
    )


def _overhead_seconds() -> tuple[float, float]:
    """The executor's own time for each operation of the forward, and what a replayed one takes beyond that.

    Views and saved tensors are included. `benchmarks/recorder.py` measured both with cold caches.
    """
    try:
        compiler()
    except BuildError:  # Python does it all
        return 30e-6, 33e-6
    return 1e-6, 9e-6


def with_earlier_gradients(graph: StepGraph) -> StepGraph:
    """The same step when its gradients exist before it, as from the second micro-step of an accumulation on:
    new gradients are added to them and freed at once.

    Gradients are the storages made in the step that have a parameter's name.
    """
    made = {s.id: s.bytes for s in graph.storages if s.name and s.producer is not None}
    ended = {event.index for event in graph.events if event.kind == "free"}
    last = {
        graph.values[value].storage: place
        for place, event in enumerate(graph.events)
        if event.kind == "op"
        for value in (*graph.operations[event.index].reads, *graph.operations[event.index].writes)
    }
    after: dict[int, list[Event]] = {}
    for storage in made:
        if storage in last and storage not in ended:
            after.setdefault(last[storage], []).append(Event("free", storage))
    events = tuple(new for place, event in enumerate(graph.events) for new in (event, *after.get(place, ())))
    return replace(graph, events=events, resident_bytes=graph.resident_bytes + sum(made.values()))
