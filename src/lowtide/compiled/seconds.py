"""How long a forward and a backward take, without compiling a kernel or running one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide.compiled.costs import Cost
from lowtide.compiled.joint import Joint, Key
from lowtide.compiled.liveness import Traffic
from lowtide.plan.data import Plan
from lowtide.private import masks
from lowtide.trace.costs.roofline import calibrate, outside_modes

_FEW = 1 << 16
"""So few booleans are not worth knowing what they take: the kernel that tells is compiled once a machine."""


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
    booleans = traffic.masks_written + traffic.masks_read
    if booleans > _FEW and torch.device(device).type == "cpu":
        with outside_modes():
            write, read = masks.mask_seconds()
        seconds += traffic.masks_written * write + traffic.masks_read * read
    return seconds


def likely_traffic(joint: Joint, half: fx.GraphModule) -> Traffic:
    """What the generated kernels of a half are likely to be given, while nobody has generated them: what each
    call of the joint graph reads and writes, and what goes from half to half though no kernel would else
    write it. To be compared with other halves of the same graph.
    """
    nodes = {node.name: node for node in half.graph.nodes}
    given = {name for name, node in nodes.items() if node.op == "placeholder"}
    returned: Any = next(iter(reversed(half.graph.nodes))).args[0]
    read: list[Key] = []
    written: list[Key] = [one.name for one in returned if isinstance(one, fx.Node) and one.name not in given]
    for call in joint.calls:
        if call.node.name in nodes.keys() - given and joint.fusible is not None and joint.fusible(call.node):
            read += call.reads
            written += call.writes
    virtual = {node.name for node in joint.virtual}
    read += [name for name in given if name in virtual]
    written = [key for key in dict.fromkeys(written) if key in joint.root]
    masks_read, masks_written = (
        sum(joint.bytes[key] for key in keys if joint.root[key].meta["val"].dtype == torch.bool)
        for keys in (read, written)
    )
    moved = sum(joint.bytes[key] for key in (*read, *written))
    return Traffic(moved - masks_read - masks_written, masks_written, masks_read)


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
