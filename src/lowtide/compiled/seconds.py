"""How long a forward and a backward take, without compiling a kernel or running one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from lowtide.compiled.costs import Cost
from lowtide.compiled.liveness import Profile
from lowtide.plan.data import Plan
from lowtide.private import masks
from lowtide.trace.costs.roofline import calibrate, outside_modes

_FEW = 1 << 16
"""So few booleans are not worth knowing what they take: the kernel that tells is compiled once a machine."""


def half_seconds(half: fx.GraphModule, profile: Profile, parts: Mapping[str, float], device: str) -> float:
    """Time of a half: what its calls compute, and what its generated kernels move.

    Args:
        half: forward or backward.
        profile: what it does to memory.
        parts: names of nodes -> what they take, of a fused one without its traffic.
        device: where it runs.
    """
    traffic = profile.traffic
    calls = [node.name for node in half.graph.nodes if node.op == "call_function"]  # an input has its maker's
    seconds = sum(parts.get(name, 0.0) for name in calls)
    seconds += traffic.bytes / calibrate(device).bytes_per_second if traffic.bytes else 0.0
    booleans = traffic.masks_written + traffic.masks_read
    if booleans > _FEW and torch.device(device).type == "cpu":
        with outside_modes():
            write, read = masks.mask_seconds()
        seconds += traffic.masks_written * write + traffic.masks_read * read
    return seconds


def parts_of(costs: Sequence[Cost]) -> dict[str, float]:
    """Names of all nodes that these calls compute -> what they take, of a fused one without its traffic."""
    return {name: seconds for cost in costs for name, seconds in cost.parts.items()}


def with_forecast(plan: Plan, seconds: float, plain_seconds: float) -> Plan:
    """A plan with the time of the halves that carry it out, and of those that `torch.compile` would run; its
    distance from the bound stays what the planner says.

    Args:
        plan: as the planner made it, from single calls.
        seconds: of its halves, without waiting for values that move.
        plain_seconds: of those of `torch.compile`.
    """
    extra = seconds + plan.transfer_seconds - plain_seconds
    return replace(
        plan,
        plain_seconds=plain_seconds,
        predicted_extra_seconds=extra,
        bound_extra_seconds=extra - plan.gap_seconds,
    )
