"""A device as three numbers, measured: how fast it computes, how fast it moves bytes, and what a call
takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lowtide import private

# of the matrices, and of the copy: activations of large steps do not lie in the processor's cache
_SIDE, _MOVED_BYTES = 512, 1 << 26
_MOVED_BYTES_ENOUGH = 1 << 22  # where room is short the copy shrinks first, to this
_SIDE_AT_LEAST, _MOVED_BYTES_AT_LEAST = 32, 1 << 13


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
def aside() -> Iterator[None]:
    """Out of every mode that the caller may be in: dispatch modes, torch functions, autocast, deterministic
    filling.
    """
    with private.without_dispatch_modes(), private.without_torch_functions(), ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def present(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


@lru_cache(maxsize=32)
def _calibrated(kind: str, dtype: torch.dtype, threads: int, side: int, moved: int) -> Roofline:
    """A matrix product and a copy, the best of a few runs."""
    del threads  # part of the key: another count of threads is another machine
    cuda = kind == "cuda"

    def best(call: Callable[[], Any], runs: int) -> float:
        times = []
        for _ in range(runs):
            if cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    with aside(), torch.no_grad():
        left = torch.full((side, side), 0.5, dtype=dtype, device=kind)
        source, target = (
            torch.ones(moved, dtype=torch.uint8, device=kind),
            torch.ones(moved, dtype=torch.uint8, device=kind),
        )
        tiny = torch.ones(4, device=kind)
        product = best(lambda: torch.ops.aten.mm.default(left, left), 5)
        copy = best(lambda: torch.ops.aten.copy_.default(target, source), 5)
        call = best(lambda: torch.ops.aten.neg.default(tiny), 50)
    return Roofline(2 * side**3 / product, 2 * moved / copy, call)


def calibrate(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, room: int | None = None
) -> Roofline:
    """The roofline of a device, measured once per process, device, dtype and number of threads (0.1 s).

    A device that is only simulated has the CPU's: ratios between operations are then right, seconds are not.

    Args:
        device: the device.
        dtype: of the matrix product.
        room: bytes that measuring may take; ``None`` is as much as it takes. With little room the operations
            are small, as those are that have to fit in it.
    """
    where = torch.device(device)
    kind = where.type if present(where) else "cpu"
    known = dtype if dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) else torch.float32
    side, moved = (4096, 1 << 28) if kind == "cuda" else (_SIDE, _MOVED_BYTES)
    while (
        room is not None
        and 2 * (side * side * known.itemsize + moved) > room
        and (side, moved) != (_SIDE_AT_LEAST, _MOVED_BYTES_AT_LEAST)
    ):
        side = side if moved > _MOVED_BYTES_ENOUGH else max(_SIDE_AT_LEAST, side // 2)
        moved = max(_MOVED_BYTES_AT_LEAST, moved // 4)
    return _calibrated(kind, known, torch.get_num_threads(), side, moved)
