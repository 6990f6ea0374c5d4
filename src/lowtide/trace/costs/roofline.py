"""A device as three numbers, measured: how fast it computes, how fast it moves bytes, and what a call
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lowtide import private
from lowtide.trace.clock import Clock

# of the matrices, and of the copy: activations of large steps do not lie in the processor's cache
_SIDE, _MOVED_BYTES = {"cpu": 512, "cuda": 4096}, {"cpu": 1 << 26, "cuda": 1 << 28}


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
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def present(device: torch.device) -> bool:
    """Whether the device is there."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def calibrate(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Roofline:
    """The roofline of a device, measured once per process, device, dtype and number of threads (0.1 s).

    A device that is only simulated has the CPU's: ratios between operations are then right, seconds are not.

    Args:
        device: the device.
        dtype: of the matrix product.
    """
    where = torch.device(device)
    known = dtype if dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) else torch.float32
    return _calibrated(where.type if present(where) else "cpu", known, torch.get_num_threads())


@lru_cache(maxsize=32)
def _calibrated(kind: str, dtype: torch.dtype, threads: int) -> Roofline:
    """A matrix product and a copy, the best of a few runs."""
    del threads  # part of the key: another count of threads is another machine
    clock = Clock(torch.device(kind))

    def best(call: Callable[[], Any], runs: int) -> float:
        return min([clock.time(call)[1]() for _ in range(runs)])

    side, moved = _SIDE[kind], _MOVED_BYTES[kind]
    with outside_modes(), torch.no_grad():
        left = torch.full((side, side), 0.5, dtype=dtype, device=kind)
        source, target = (torch.ones(moved, dtype=torch.uint8, device=kind) for _ in range(2))
        tiny = torch.ones(4, device=kind)
        product = best(lambda: torch.ops.aten.mm.default(left, left), 5)
        copy = best(lambda: torch.ops.aten.copy_.default(target, source), 5)
        call = best(lambda: torch.ops.aten.neg.default(tiny), 50)
    return Roofline(2 * side**3 / product, 2 * moved / copy, call)
