"""How long a forward and a backward take, without compiling a kernel or running one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from lowtide.compiled.costs import Cost
from lowtide.compiled.liveness import Traffic
from lowtide.trace.costs.roofline import calibrate

MASK_SECONDS = 8e-9, 3e-9
"""To write a boolean, and to read one: Inductor's C++ kernels convert masks between vectors' lanes and bytes
one by one, and take so long for it on an AMD EPYC with AVX-512, where a float takes 0.1 to 0.3 ns.
"""


def half_seconds(half: fx.GraphModule, traffic: Traffic, parts: Mapping[str, float], device: str) -> float:
    """Time of a half: what its calls compute, and what its generated kernels move.

    Args:
        half: forward or backward.
        traffic: of its generated kernels.
        parts: names of nodes -> what they take, of a fused one without its traffic.
        device: where it runs.
    """
    calls = [node.name for node in half.graph.nodes if node.op == "call_function"]  # an input has its maker's
    seconds = sum(parts.get(name, 0.0) for name in calls)
    seconds += traffic.bytes / calibrate(device).bytes_per_second if traffic.bytes else 0.0
    if torch.device(device).type == "cpu":
        write, read = MASK_SECONDS
        seconds += traffic.masks_written * write + traffic.masks_read * read
    return seconds


def parts_of(costs: Mapping[str, Cost]) -> dict[str, float]:
    """Names of all nodes that these calls compute -> what they take, of a fused one without its traffic."""
    return {name: seconds for cost in costs.values() for name, seconds in cost.parts.items()}
