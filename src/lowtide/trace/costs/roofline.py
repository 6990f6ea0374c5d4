"""A device as three numbers, measured: how fast it computes, how fast it moves bytes, and what a call
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from lowtide import accelerator, private
from lowtide.trace.clock import Clock

# of the largest matrices, and of the copy: activations of large steps do not lie in the processor's cache
_SIDE = {"cpu": 512, accelerator.KIND: 4096}
_LEAST_SIDE = 512
_LONG_SECONDS = 0.02
"""No product is timed that would take longer: one that takes so long keeps its device busy."""
_MOVED_BYTES = {"cpu": 1 << 26, accelerator.KIND: 1 << 27}
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device as three numbers: floating-point operations a second, bytes a second, seconds a call at
    least.
    """

    flops_per_second: float
    bytes_per_second: float
    overhead_seconds: float

    def seconds(self, flops: float, bytes: float) -> float:
        """Time of an operation that computes so much and moves so much."""
        return self.overhead_seconds + max(flops / self.flops_per_second, bytes / self.bytes_per_second)


@contextmanager
def outside_modes() -> Iterator[None]:
    """Out of every mode that the caller may be in: dispatch modes, torch functions, autocast, deterministic
    filling.
    """
    with private.without_dispatch_modes(), private.without_torch_functions(), ExitStack() as stack:
        for kind in ("cpu", accelerator.KIND):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def present(device: torch.device) -> bool:
    """Whether the device is there."""
    return device.type == "cpu" or (accelerator.is_accelerator(device) and accelerator.is_present())


def calibrate(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    memory_limit_bytes: int | None = None,
) -> Roofline:
    """The roofline of a device, measured once per process, device, dtype and number of threads (0.1 s).

    A device that is only simulated has the CPU's: ratios between operations are then right, seconds are not.

    Args:
        device: the device.
        dtype: of the matrix product.
        memory_limit_bytes: the most that the measurement may take, down to `_LEAST_BYTES`; of an accelerator
            it takes a quarter of what is free at most, and 256 MiB.
    """
    where = torch.device(device)
    known = dtype if dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) else torch.float32
    kind = where.type if present(where) else "cpu"
    moved = _MOVED_BYTES[kind]
    if kind == accelerator.KIND:  # a full one has room for what it is asked for all the same
        room = (accelerator.free_bytes(where) + accelerator.unused_bytes(where)) // 4
        memory_limit_bytes = room if memory_limit_bytes is None else min(room, memory_limit_bytes)
        where = where if where.index is not None else accelerator.current_device()
    else:
        where = torch.device(kind)
    while memory_limit_bytes is not None and 2 * moved > max(memory_limit_bytes, _LEAST_BYTES):
        moved //= 2  # what fits into so little lies in the cache in the step, too
    return _calibrate(where, known, torch.get_num_threads(), moved)


@lru_cache(maxsize=32)
def _calibrate(where: torch.device, dtype: torch.dtype, threads: int, moved: int) -> Roofline:
    """A matrix product and a copy, the best of a few runs. The product grows until it keeps the device busy:
    on a slow one (in double precision, say) the largest would take seconds.
    """
    del threads  # part of the key: another count of threads is another machine
    clock = Clock(where)

    def best(call: Callable[[], Any], runs: int) -> float:
        return min([clock.time(call)[1]() for _ in range(runs)])

    aten, side = torch.ops.aten, _LEAST_SIDE

    def product_of(side: int) -> float:
        square = torch.full((side, side), 0.5, dtype=dtype, device=where)
        return best(partial(aten.mm.default, square, square), 5)

    with outside_modes(), torch.no_grad():
        # one after the other: each goes before the next is made
        product = product_of(side)
        while side < _SIDE[where.type] and 8 * product < _LONG_SECONDS:
            side *= 2
            product = product_of(side)
        both = [torch.ones(moved, dtype=torch.uint8, device=where) for _ in range(2)]
        copy = best(partial(aten.copy_.default, *both), 5)
        tiny = torch.ones(4, device=where)
        call = best(partial(aten.neg.default, tiny), 50)
    return Roofline(2 * side**3 / product, 2 * moved / copy, call)
