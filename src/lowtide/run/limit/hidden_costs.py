"""What a step takes that its graph does not show: collectives under way, the random states of checkpoints,
and the executor's own time.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lowtide.graph import StepGraph
from lowtide.ops import FUNCTIONAL_COLLECTIVES
from lowtide.run.record.overhead import executor_overhead


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
    overhead = executor_overhead()
    behind = torch.device(graph.device).type != "cpu"
    hidden = [op.seconds if behind else 0.0 for op in graph.operations if op.phase == "forward"]
    return replace(
        graph,
        overhead_seconds=sum(max(0.0, overhead.passing_seconds - seconds) for seconds in hidden),
        replay_overhead_seconds=sum(max(0.0, overhead.replayed_seconds - seconds) for seconds in hidden)
        / max(1, len(hidden)),
    )
