"""The `peak` of a block of code, on any device that has a meter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from lowtide import accelerator
from lowtide.errors import MeterError

from .allocator import AllocatorPeak, Peak, Source, available
from .resident import device_of


def device_with_meter(device: torch.device | str | None) -> torch.device:
    """The device; ``None`` means CUDA where this process uses it, else the CPU.

    Raises:
        MeterError: its memory cannot be measured.
    """
    if device is None:
        device = accelerator.KIND if accelerator.is_used() else "cpu"
    where = device_of(device)
    if accelerator.is_accelerator(where):
        if not accelerator.is_present():
            raise MeterError(f"memory on {where} cannot be measured: this process has no CUDA device")
    elif where.type != "cpu":
        raise MeterError(f"memory on {where} cannot be measured; the meter knows 'cpu' and 'cuda'")
    return where


def kind_of_peak(device: torch.device, source: Literal["auto"] | Source) -> type[Peak]:
    """What reads a device's memory.

    Raises:
        MeterError: ``source`` is none of its own.
    """
    if accelerator.is_accelerator(device):
        from .cuda import CudaPeak as known  # loaded where a card is
    elif source == "profiler" or (source == "auto" and not available()):
        from .profiler import ProfilerPeak as known  # loaded where no compiler is
    else:
        known = AllocatorPeak
    if source not in ("auto", known.source):
        own = "cuda" if accelerator.is_accelerator(device) else "allocator or profiler"
        raise MeterError(f"source={source!r} does not measure memory on {device}: use 'auto', or {own}")
    return known


def measurable(device: torch.device | str) -> bool:
    """Whether a device's memory can be read at any time, with the meter that is its own."""
    device = device_of(device)
    return accelerator.is_accelerator(device) or (device.type == "cpu" and available())


def peak(
    device: torch.device | str | None = None,
    source: Literal["auto"] | Source = "auto",
    timeline: bool = False,
) -> Peak:
    """A context manager that gives ``peak_bytes`` and ``live_bytes`` above those live at entry; cheap enough
    for every training step.

    Where the counting allocator cannot be had, the profiler watches the block instead: slower, known only
    after the block, not nested. On CUDA it resets the device's peak statistic
    (`torch.cuda.max_memory_allocated`).

    Args:
        device: ``cpu`` or a CUDA device; ``None`` means CUDA where this process uses it, else the CPU.
        source: what to read on the CPU: ``auto`` takes the allocator if it can.
        timeline: whether to log every allocation and free.

    Raises:
        MeterError: the device has no meter, or ``source`` is none of its own.
    """
    return peaks(device, source)(timeline)


def peaks(
    device: torch.device | str | None = None, source: Literal["auto"] | Source = "auto"
) -> Callable[[bool], Peak]:
    """Makes one `peak` of a device after the other, with a timeline or without: for thousands of calls."""
    where = device_with_meter(device)
    return partial(kind_of_peak(where, source), where)
