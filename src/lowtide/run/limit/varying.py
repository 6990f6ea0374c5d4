"""What steps that run other operations each time take from the step that was planned for.

In: its step graph. Out: what `lowtide.run.record.on_demand` needs to know of operations and of memory.
"""

from __future__ import annotations

from collections import defaultdict

from lowtide.graph import StepGraph
from lowtide.ops import operation_named
from lowtide.plan.simulate import plain


def rates(graph: StepGraph) -> dict[int | None, float]:
    """Seconds of an operation, by its ``id``, for a byte that it reads or writes; under ``None``, of all."""
    sizes = [graph.storages[value.storage].bytes for value in graph.values]
    seconds, nbytes = defaultdict[int | None, float](float), defaultdict[int | None, int](int)
    for operation in graph.operations:
        size = sum(sizes[value] for value in {*operation.reads, *operation.writes})
        for key in (id(operation_named(operation.name)), None):
            seconds[key] += operation.seconds
            nbytes[key] += size
    return {key: seconds[key] / max(1, nbytes[key]) for key in {*seconds, None}}


def rise_bytes(graph: StepGraph) -> int:
    """By how much live bytes rise at most from one time that they are looked at to the next: before an
    operation of the forward, and where backward asks for a saved tensor.
    """
    step = plain(graph)
    most, before, looked = 0, graph.resident_bytes, graph.resident_bytes
    for (kind, index), top, after in zip(graph.events, step.top_bytes, step.live_bytes, strict=True):
        if kind == "unpack" or (kind == "op" and graph.operations[index].phase == "forward"):
            looked = before
        most, before = max(most, int(top) - looked), int(after)
    return most
