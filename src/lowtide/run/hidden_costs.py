"""What a step takes that its graph does not show: collectives under way, the random states of checkpoints,
the executor's own time, and the gradients that stand before a later step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lowtide.graph import Event, StepGraph
from lowtide.native import BuildError, compiler
from lowtide.ops import FUNCTIONAL_COLLECTIVES


def overlapped_bytes(graph: StepGraph) -> int:
    """What collectives under way may hold beside the operations that they overlap: a gather and a
    reduce-scatter at a time.

    A trace shows it where they start; how long it stays is up to the other ranks.
    """
    found: dict[str, int] = {}
    for operation in graph.operations:
        if operation.name in FUNCTIONAL_COLLECTIVES:
            found[operation.name] = max(found.get(operation.name, 0), operation.scratch_bytes)
    return sum(found.values())


def checkpoint_bytes(graph: StepGraph, checkpoints: int) -> int:
    """What as many calls of ``torch.utils.checkpoint`` hold beside their inputs, from forward to backward:
    the CPU's random state each, in a tensor that no operation makes.
    """
    if torch.device(graph.device).type != "cpu":
        return 0
    return checkpoints * torch.default_generator.get_state().nbytes


def with_overhead(graph: StepGraph) -> StepGraph:
    """The graph with what this executor adds to its operations here.

    A GPU runs behind the host: what the host adds to an operation shows by as much as it is longer than the
    operation.
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
    """What the executor adds to each operation of the forward, its views and saved tensors included, and to
    each that is recorded and runs again beyond that, as `benchmarks/recorder.py` reads it with cold caches.
    """
    try:
        compiler()
    except BuildError:  # Python does it all
        return 30e-6, 33e-6
    return 1e-6, 9e-6


def with_standing_gradients(graph: StepGraph) -> StepGraph:
    """The step that ``graph`` shows, when the gradients that it made stood before it, as they do from the
    second micro-step of an accumulation on: what it makes now is added to them and ends at once.

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
