"""How long a forward and a backward take, without compiling a kernel or running one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.compiled.costs import Cost
from lowtide.compiled.joint import Joint, Key
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


def likely_traffic(joint: Joint, half: fx.GraphModule) -> Traffic:
    """What the generated kernels of a half are likely to be given, while nobody has generated them: what each
    call of the joint graph reads and writes, and what goes from half to half though no kernel would else
    write it. Masks that do not are computed where they are read. To be compared with other halves.
    """
    names = {node.name for node in half.graph.nodes if node.op == "call_function"}
    kept: Any = next(iter(reversed(half.graph.nodes))).args[0]
    masks = {key for key, root in joint.root.items() if root.meta["val"].dtype == torch.bool}

    def crossing(nodes: Iterable[Any]) -> set[Key]:
        found = {joint.key_of.get(joint.names.get(getattr(node, "name", ""), node)) for node in nodes}
        return {key for key in found if key is not None}

    written, read = crossing(kept), crossing(half.graph.find_nodes(op="placeholder"))
    crossed = (written | read) - masks
    moved = sum(joint.bytes[key] for key in crossed if joint.root[key] in joint.virtual)
    for call in joint.calls:
        if call.node.name in names and joint.fusible is not None and joint.fusible(call.node):
            moved += sum(joint.bytes[key] for key in (*call.reads, *call.writes) if key not in masks)
    masks_written, masks_read = (sum(map(joint.bytes.__getitem__, keys & masks)) for keys in (written, read))
    return Traffic(moved, masks_written, masks_read)


def parts_of(costs: Sequence[Cost]) -> dict[str, float]:
    """Names of all nodes that these calls compute -> what they take, of a fused one without its traffic."""
    return {name: seconds for cost in costs for name, seconds in cost.parts.items()}
