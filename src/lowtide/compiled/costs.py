"""What the calls of a joint graph cost, and from that how long its halves take.

Calls are timed by themselves, and count less where one kernel takes several. No kernel is compiled for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lowtide import budget as budgets
from lowtide.compiled.joint import Call, Joint, described
from lowtide.compiled.liveness import Traffic
from lowtide.private import OpOverload, partitioning, tree_leaves
from lowtide.trace.costs.measure import measure_costs
from lowtide.trace.costs.roofline import calibrate
from lowtide.trace.costs.specs import OpSpec, described_call

_FUSED_SHARE = 0.1
"""Of what an element-wise call takes by itself, what its arithmetic adds to a kernel that has its inputs."""


Size = Callable[[Any], int]
"""A size as a number."""


@dataclass(frozen=True)
class Cost:
    """What one run of a call costs.

    Attributes:
        seconds: its time.
        scratch_bytes: what it takes beyond its results.
        surplus_bytes: what the storage of its one result takes beyond what the graph says.
        parts: names of the nodes that it computes -> what each adds, of a fused one without its traffic.
    """

    seconds: float
    scratch_bytes: int
    surplus_bytes: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)


def room_for_timing(joint: Joint, budget: str | int | None = None, standing_bytes: int = 0) -> int:
    """Bytes that a graph's calls may be timed in, before any of its activations are there: those of a budget
    that is given in bytes; else what every budget has room for, the largest call and all that is returned.

    Args:
        joint: the graph.
        budget: of the step that the graph is; ``None`` where it is a part of one.
        standing_bytes: what stands beside what the graph allocates.
    """
    returned = {joint.key_of.get(node) for node in joint.outputs[1] if isinstance(node, fx.Node)}
    least = sum(joint.bytes[key] for key in returned if key is not None)
    least = max([least, *(joint.bytes_at(call, joint.size) for call in joint.calls)])
    in_bytes = not budgets.asks_for(budget) and not (isinstance(budget, str) and "%" in budget)
    given = budgets.parse(budget) - standing_bytes if budget is not None and in_bytes else 0
    return max(given, least)


def costs_of(
    joint: Joint, time_budget: float = 0.7, memory_limit_bytes: int | None = None
) -> dict[str, Cost]:
    """A `Cost` for every call of a graph, by the name of its node. Equal calls are timed once, on made-up
    inputs.

    Args:
        joint: the graph.
        time_budget: seconds.
        memory_limit_bytes: the most that the timing may take, scratch of single calls aside.
    """
    specs: dict[Any, OpSpec] = {}
    keys: dict[fx.Node, Any] = {}
    for node in {one: None for call in joint.calls for one in (call.node, *call.inlined)}:
        spec = spec_of(node, joint.size)
        if spec is not None:
            keys[node] = repr(spec)
            specs.setdefault(keys[node], spec)
    measured = measure_costs(specs, time_budget=time_budget, memory_limit_bytes=memory_limit_bytes)
    found: dict[str, Cost] = {}
    for call in joint.calls:
        own = measured.get(keys.get(call.node))
        fused = joint.fusible is not None and joint.fusible(call.node)
        parts = {one.name: measured[keys[one]].seconds * _FUSED_SHARE for one in call.inlined if one in keys}
        if own is None:
            cost = Cost(0.0, 0, parts=parts)
        elif fused:
            parts[call.node.name] = own.seconds * _FUSED_SHARE
            cost = Cost(
                _moving_seconds(joint, call, memory_limit_bytes) + sum(parts.values()), 0, parts=parts
            )
        else:
            parts[call.node.name] = own.seconds
            surplus = own.surplus_bytes if len(call.writes) == 1 else 0
            cost = Cost(own.seconds, own.scratch_bytes, surplus, parts)
        found[call.node.name] = cost
    return found


def _moving_seconds(joint: Joint, call: Call, memory_limit_bytes: int | None) -> float:
    """Time of a generated kernel's traffic."""
    moved = sum(joint.bytes[key] for key in (*call.reads, *call.writes))
    value = call.node.meta.get("val")
    device = value.device if isinstance(value, torch.Tensor) else "cpu"
    return moved / calibrate(device, memory_limit_bytes=memory_limit_bytes).bytes_per_second


def spec_of(node: fx.Node, size_of: Size = partitioning.hint) -> OpSpec | None:
    """A call without its tensors; ``None`` for what is no operation (a size, a region of its own)."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    args, kwargs = described(node)
    value = node.meta.get("val")
    known = {address for address in map(partitioning.storage_of, _leaves((args, kwargs))) if address}
    fresh = {
        partitioning.storage_of(one): size_of(one.untyped_storage().nbytes())
        for one in _leaves(value)
        if partitioning.storage_of(one) not in known and partitioning.storage_of(one) is not None
    }
    return described_call(node.target, args, kwargs, size_of, sum(fresh.values()))


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# ---- of a half ------------------------------------------------------------------------------------

MASK_SECONDS = 8e-9, 3e-9
"""To write a boolean, and to read one: Inductor's C++ kernels convert masks between vectors' lanes and bytes
one by one, and take so long for it on an AMD EPYC with AVX-512, where a float takes 0.1 to 0.3 ns.
"""


def half_seconds(
    half: fx.GraphModule,
    traffic: Traffic,
    parts: Mapping[str, float],
    device: str,
    memory_limit_bytes: int | None = None,
) -> float:
    """Time of a half: what its calls compute, and what its generated kernels move.

    Args:
        half: forward or backward.
        traffic: of its generated kernels.
        parts: names of nodes -> what they take, of a fused one without its traffic.
        device: where it runs.
        memory_limit_bytes: the most that measuring the device may take, where nobody has.
    """
    calls = [node.name for node in half.graph.nodes if node.op == "call_function"]  # an input has its maker's
    seconds = sum(parts.get(name, 0.0) for name in calls)
    if traffic.bytes:
        machine = calibrate(device, memory_limit_bytes=memory_limit_bytes)
        seconds += traffic.bytes / machine.bytes_per_second
    if torch.device(device).type == "cpu":
        write, read = MASK_SECONDS
        seconds += traffic.masks_written * write + traffic.masks_read * read
    return seconds


def parts_of(costs: Mapping[str, Cost]) -> dict[str, float]:
    """Seconds of every node that these calls compute, by name; a fused one's traffic is not in them."""
    return {name: seconds for cost in costs.values() for name, seconds in cost.parts.items()}
