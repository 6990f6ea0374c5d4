"""Gathers that a plan runs again: the layers that make them save the gathered tensor, so that it is not
gathered a second time in backward.

A sequence-parallel layer saves its shard and gathers it again for its weight's gradient. A plan may run the
very same gather for the products behind it. So where a first plan does, the step is traced once more with the
layers told to save what is gathered: it comes back with the replay, serves the products and the weight, and
costs nothing in forward. What that is worth (one gather less) and what it takes (the gathered tensor stays
until the weight's gradient is made) the planner sees, since the second trace shows it; the better plan of the
two is taken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from lowtide.graph import StepGraph
from lowtide.plan.data import Plan

_GATHER = "_c10d_functional.all_gather_into_tensor.default"


def replayed_gathers(graph: StepGraph, plan: Plan) -> frozenset[int]:
    """The gathers of the forward that the plan runs again."""
    return frozenset(index for index in plan.replayed if graph.operations[index].name == _GATHER)


def same_forward(a: StepGraph, b: StepGraph) -> bool:
    """Whether two traces ran the same forward, so that a value of one is a value of the other."""
    first, second = (
        [(o.name, o.reads, o.writes) for o in graph.operations if o.phase == "forward"] for graph in (a, b)
    )
    return first == second


def beside(plan: Plan, plain: Plan) -> Plan:
    """A plan with claims, told as what it adds to the step without any: the step that ``plain`` is a plan
    for.
    """
    less = plain.plain_seconds - plan.plain_seconds
    return replace(
        plan,
        plain_peak_bytes=plain.plain_peak_bytes,
        plain_seconds=plain.plain_seconds,
        predicted_extra_seconds=plan.predicted_extra_seconds - less,
        bound_extra_seconds=max(0.0, min(plan.bound_extra_seconds - less, plain.bound_extra_seconds)),
        bound_peak_bytes=min(plan.bound_peak_bytes, plain.bound_peak_bytes),
    )


def with_seconds_of(graph: StepGraph, other: StepGraph) -> StepGraph:
    """The graph with the seconds that another look at such a step saw, operation by operation of one name:
    two looks never time alike.
    """
    waiting: dict[tuple[str, str], deque[float]] = {}
    for operation in other.operations:
        waiting.setdefault((operation.phase, operation.name), deque()).append(operation.seconds)
    operations = tuple(
        replace(operation, seconds=times.popleft())
        if (times := waiting.get((operation.phase, operation.name)))
        else operation
        for operation in graph.operations
    )
    return replace(
        graph, operations=operations, plain_seconds=sum(operation.seconds for operation in operations)
    )
