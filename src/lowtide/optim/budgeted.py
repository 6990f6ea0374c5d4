"""What a planner asks: the memory that the optimizer takes on the device, and what moving it to the host
costs in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from lowtide.optim.balance import measure
from lowtide.optim.errors import OptimError
from lowtide.optim.kernels import Group
from lowtide.optim.layout import cuts, granule
from lowtide.optim.placed import PlacedOptimizer
from lowtide.optim.tensors import local

_HALVINGS = 3
_AS_GOOD = 1.02  # measured speeds are no more exact than that; of shares as good the smallest is taken


def trainable(optimizer: PlacedOptimizer) -> list[tuple[Tensor, Group]]:
    """The parameters that have or will have state, with their groups."""
    return [(p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def host_is_device(optimizer: PlacedOptimizer) -> bool:
    """Whether the host tier is the device's own memory, so that moving state there saves nothing."""
    return optimizer.link.direct and optimizer.host == "memory"


def resident_state(optimizer: PlacedOptimizer) -> list[Tensor]:
    """The tensors of state in the device's memory now, buffers included."""
    found = [
        tensor
        for tensor in optimizer._updater.buffers()
        if optimizer.link.direct or tensor.device.type != "cpu"
    ]
    for slot in optimizer._slots.values():
        for part in slot.parts():
            if not part.on_host or host_is_device(optimizer):
                found += part.tensors()
            if part.before is not None and host_is_device(optimizer):
                found += part.before.tensors()
    return found


def device_state_bytes(optimizer: PlacedOptimizer, host_fraction: float) -> int:
    """Bytes of state on the device, present or still to come, when the host has this share."""
    chosen = trainable(optimizer)
    pieces = [local(p) for p, _ in chosen]
    kept = [piece.numel() for piece in pieces]
    if not host_is_device(optimizer):
        kept = cuts(kept, [granule(piece.dtype, optimizer.kernel.granule) for piece in pieces], host_fraction)
    state = sum(
        count * optimizer._placement.device_bytes_per_element(p, group)
        for count, (p, group) in zip(kept, chosen, strict=True)
    )
    if not (optimizer.reversible and host_is_device(optimizer)):
        return state
    width = optimizer._placement.update_dtype
    copies = (local(p).numel() * (len(optimizer.kernel.names(g)) + 1) * width(p).itemsize for p, g in chosen)
    return state + sum(copies)


def step_bytes(optimizer: PlacedOptimizer) -> int:
    """The most that ``step()`` allocates on the device beyond its state: buffers, where something has to be
    converted or begun, and what updates allocate in passing."""
    chosen, kernel, chunk = trainable(optimizer), optimizer.kernel, optimizer._updater.chunk_elements
    converts = any(optimizer._placement.update_dtype(p) != p.dtype for p, _ in chosen)
    begun = max((len(kernel.names(group)) for _, group in chosen), default=0) * (not kernel.counts_steps)
    copies = optimizer._placement.host_copies and optimizer.link.direct
    if not kernel.temporaries:
        return 2 * chunk * 4 * (converts or begun > 0 or copies)
    batch = min(chunk, sum(local(p).numel() for p, _ in chosen))
    width = max((optimizer._placement.update_dtype(p).itemsize for p, _ in chosen), default=0)
    return 2 * chunk * 4 * (converts or copies) + (kernel.temporaries + begun) * batch * width


def update_seconds(optimizer: PlacedOptimizer) -> Callable[[float], float]:
    """From the host's share to the seconds of ``step()``, by speeds that are measured now."""
    chosen = trainable(optimizer)
    if not chosen:
        raise OptimError("no parameter is trainable: there is nothing to balance")
    speeds = measure(optimizer._updater, optimizer._placement, chosen, optimizer.stream_gradients)
    elements = sum(local(p).numel() for p, _ in chosen)
    return lambda share: speeds.step_seconds(elements, share)


def choose(optimizer: PlacedOptimizer, extra_seconds: Callable[[float], float]) -> float:
    """The host's share of least time, where a share also costs or saves time elsewhere.

    The search halves towards the cheaper side: what a share costs elsewhere falls with it, and the update's
    own time grows.

    Args:
        optimizer: whose state it is.
        extra_seconds: from a share to the seconds that the rest of the step takes on top; ``inf`` where it
            does not fit.
    """
    own = update_seconds(optimizer)
    known: dict[float, float] = {}

    def seconds(share: float) -> float:
        if share not in known:
            known[share] = extra_seconds(share) + own(share)
        return known[share]

    if not optimizer.link.parallel and extra_seconds(0.0) == 0.0:
        return 0.0  # one processor does both sides' work: moving state saves no time
    low, high = 0.0, 1.0
    for share in (low, 0.5, high):
        seconds(share)
    for _ in range(_HALVINGS):
        best = min(known, key=lambda share: known[share])
        tried = sorted(known)
        place = tried.index(best)
        for neighbour in (tried[place - 1] if place else best, tried[min(place + 1, len(tried) - 1)]):
            if neighbour != best:
                seconds((best + neighbour) / 2)
    least = min(known.values())
    if math.isinf(least):
        return 1.0
    return min(share for share, taken in known.items() if taken <= least * _AS_GOOD)
