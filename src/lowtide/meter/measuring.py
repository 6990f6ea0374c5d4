"""`measure` a step: exact live bytes, and seconds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lowtide import accelerator
from lowtide.errors import MeterError, expect, is_count

from .allocator import AllocatorPeak, Source, counting_allocator
from .peaks import device_with_meter, kind_of_peak


@dataclass(frozen=True)
class Measurement:
    """What a step did. Bytes are those of PyTorch's tensors and scratch, as requested.

    Attributes:
        peak_bytes: most bytes live at any moment, on top of those live at the start.
        end_bytes: bytes still live at the end, on top of the start, the step's value included.
        timeline: (seconds since the start, bytes live on top of the start) after every allocation and free,
            in order.
        seconds: median wall time of one run.
        value: what the step returned in its last run.
        source: where the bytes come from.
        reserved_bytes: on CUDA the most the allocator took from the device, else ``None``.
        allocated_bytes: on CUDA most bytes of the allocator's blocks, on top of those at the start: what was
            requested is rounded up to them. Else ``None``.
    """

    peak_bytes: int
    end_bytes: int
    timeline: tuple[tuple[float, int], ...] = field(repr=False)
    seconds: float
    value: Any = field(repr=False)
    source: Source
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None


def measure(
    step: Callable[..., Any],
    *args: Any,
    repeats: int = 1,
    warmup: int = 0,
    timeline: bool = True,
    device: torch.device | str | None = None,
    source: Literal["auto"] | Source = "auto",
) -> Measurement:
    """Run a step and say what it did to memory, and how long it took.

    Bytes are those of the last run. Seconds are the median of the runs before it when ``repeats`` is above 1,
    for the last one also logs its events (or is watched by the profiler). On the CPU, the free of a tensor
    that was allocated before the meter was installed is not seen: keep it installed where a step frees what
    it found.

    ``peak_bytes`` is what the call adds above what was resident before it. A budget of `limit_memory` and a
    plan's predicted peak count what was resident, too: to compare, add ``resident_bytes(model)`` (parameters,
    buffers and gradients; with an optimizer that the limit counts, its state) as it was before the call, and
    the bytes of the inputs; on CUDA also the workspaces of cuBLAS, which are resident from the first product
    on (32 MiB on a Hopper, 8.1 on most others, for forward's thread and for backward's).

    Args:
        step: what to run, usually a forward and backward.
        args: its arguments.
        repeats: runs that count.
        warmup: runs before, that do not.
        timeline: whether to log every allocation and free.
        device: whose memory; ``None`` means CUDA where this process uses it, else the CPU.
        source: what to read on the CPU: ``auto`` takes the counting allocator if it can, else the profiler.

    Raises:
        MeterError: as of `peak`; ``step`` is no function, or a count is out of range.

    Example:
        >>> from lowtide.meter import resident_bytes
        >>> model, inputs = torch.nn.Linear(8, 8), torch.randn(4, 8)
        >>> resident = resident_bytes(model) + inputs.nbytes
        >>> resident, measure(model, inputs).peak_bytes  # the output alone is new
        (416, 128)
    """
    expect(callable(step), "measure(step=)", step, "a function that runs one step", MeterError)
    expect(is_count(repeats, 1), "measure(repeats=)", repeats, "a whole number, 1 or more", MeterError)
    expect(is_count(warmup), "measure(warmup=)", warmup, "a whole number, 0 or more", MeterError)
    where = device_with_meter(device)
    kind = kind_of_peak(where, source)
    allocator = counting_allocator() if kind is AllocatorPeak else None
    if allocator is not None:
        # from before the warm-up, so that what one run leaves and the next frees is known
        allocator.install()
    try:
        gc.collect()  # garbage of before would be freed in between
        for _ in range(warmup):
            step(*args)
        times = [_time(step, args, where)[0] for _ in range(repeats - 1)]
        accelerator.synchronize(where)
        with kind(where, timeline) as seen:
            seconds, value = _time(step, args, where)
    finally:
        if allocator is not None:
            allocator.uninstall()
    typical = statistics.median(times or [seconds])
    return Measurement(
        seen.peak_bytes,
        seen.live_bytes,
        seen.timeline,
        typical,
        value,
        seen.source,
        seen.reserved_bytes,
        seen.allocated_bytes,
    )


def _time(step: Callable[..., Any], args: tuple[Any, ...], device: torch.device) -> tuple[float, Any]:
    accelerator.synchronize(device)
    begin = time.perf_counter()
    value = step(*args)
    accelerator.synchronize(device)
    return time.perf_counter() - begin, value
