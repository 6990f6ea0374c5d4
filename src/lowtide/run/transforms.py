"""Transforms of a profiled step before it is planned for, and numbers that are read off it.

In: a step graph. Out: the same with bytes and seconds in it that the profile does not show (`with_...`, which
`PlanMaker.transform` applies); or a number: the bytes of checkpoints' random states and of what the step does
not use, and the share of a budget that a plan leaves free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from lowtide.graph import Event, StepGraph
from lowtide.meter.resident import gradient_of


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
    behind = torch.device(graph.device).type != "cpu"
    hidden = [op.seconds if behind else 0.0 for op in graph.operations if op.phase == "forward"]
    return replace(
        graph,
        overhead_seconds=sum(max(0.0, _PASSING_SECONDS - seconds) for seconds in hidden),
        replay_overhead_seconds=sum(max(0.0, _REPLAYED_SECONDS - seconds) for seconds in hidden)
        / max(1, len(hidden)),
    )


_PASSING_SECONDS, _REPLAYED_SECONDS = 1e-6, 9e-6
"""The executor's own time for each operation of the forward, and what a replayed one takes beyond that. Views
and saved tensors are included. `benchmarks/recorder.py` measured both with cold caches."""


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


def with_resident(graph: StepGraph, more: int) -> StepGraph:
    """The step with so many more resident bytes."""
    return replace(graph, resident_bytes=graph.resident_bytes + more)


def unused_bytes(model: torch.nn.Module, graph: StepGraph, own_bytes: int) -> int:
    """Bytes of the model's parameters, buffers and gradients that exist before the step, and that the step
    does not use. Asked once backward has ended.

    Args:
        model: the model.
        graph: the step.
        own_bytes: of the model's parameters, buffers and gradients, now.
    """
    seen = sum(s.bytes for s in graph.storages if s.kind in ("parameter", "buffer", "gradient"))
    there = {name for name, p in model.named_parameters() if gradient_of(p) is not None}
    # gradients that the step made
    made = sum(s.bytes for s in graph.storages if s.name in there and s.producer is not None)
    return max(0, own_bytes - made - seen)


def with_unreplayable(graph: StepGraph, findings: Mapping[str, str]) -> StepGraph:
    """The step with operations that never run again.

    Args:
        graph: the step.
        findings: their names, with the reason.
    """
    if not findings:
        return graph
    return graph.with_operations(
        lambda op: replace(op, replayable=False, reason=findings[op.name]) if op.name in findings else op
    )


def with_crossing(graph: StepGraph, spans: Sequence[tuple[int, int]]) -> StepGraph:
    """The step with values that one of its forwards makes and another reads kept: each is recorded by itself.

    Args:
        graph: the step.
        spans: of each forward, its first operation and the first one after it.
    """
    if len(spans) < 2:
        return graph
    of = {index: number for number, (begin, end) in enumerate(spans) for index in range(begin, end)}
    crossing = {
        producer
        for op in graph.operations
        for value in op.reads
        if (producer := graph.values[value].producer) in of and of.get(op.index, of[producer]) != of[producer]
    }
    return graph.with_operations(
        lambda op: replace(op, replayable=False, reason=_CROSSING) if op.index in crossing else op
    )


_CROSSING = "another forward of the step reads it"

_SIZED_BY_VALUES = ("aten.nonzero.", "aten.masked_select.", "aten._unique", "aten.unique_")
"""Operations the sizes of whose results depend on values."""

_SPREAD = 0.01
"""Share of a budget that a plan leaves free where sizes depend on values, as those of routed tokens do."""


def spread(graph: StepGraph) -> float:
    """Share of the budget that a plan of this step leaves free: some where values decide how large results
    are, so that steps of the same operations take other bytes.
    """
    return _SPREAD if any(op.name.startswith(_SIZED_BY_VALUES) for op in graph.operations) else 0.0
