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
    """Memory and time of a step. Bytes are the requested bytes of PyTorch's tensors and scratch memory.

    Attributes:
        peak_bytes: the peak above the bytes that were live at the start.
        end_bytes: live bytes at the end above those at the start; they contain the step's result.
        timeline: (seconds since the start, live bytes above the start) after every allocation and free, in
            order.
        seconds: median wall time of one run.
        value: the step's result in its last run.
        source: the meter.
        reserved_bytes: on CUDA the most bytes that the allocator reserved, else ``None``.
        allocated_bytes: on CUDA the peak of the allocator's blocks above the start, else ``None``. A block is
            the requested size, rounded up.
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
    """Run a step, and measure its memory and its time.

    Bytes are those of the last run. If ``repeats`` is above 1, seconds are the median of the other runs,
    because the last run also logs its events. On the CPU, the meter does not see that a tensor is freed which
    was allocated before the meter was installed.

    ``peak_bytes`` counts from the resident memory before the call. A budget of `limit_memory` and a plan's
    predicted peak also count resident memory. To compare, add ``resident_bytes(model)`` (parameters, buffers
    and gradients; ``resident_bytes(model, optimizer)`` if the limit counts an optimizer) as it was before the
    call, and the bytes of the inputs. On CUDA also add the workspaces of cuBLAS, which are resident from the
    first matrix product on (32 MiB on a Hopper, 8.1 on most others, for each of two threads).

    Args:
        step: a function that runs one step, usually a forward and a backward.
        args: its arguments.
        repeats: how many runs to measure.
        warmup: how many runs come before.
        timeline: whether to log every allocation and free.
        device: the device to measure; ``None`` is CUDA if this process uses it, else the CPU.
        source: the meter on the CPU: ``auto`` takes the counting allocator if possible, else the profiler.

    Raises:
        MeterError: as in `peak`; or ``step`` is no function, or a count is out of range.

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
