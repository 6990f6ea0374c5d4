"""What the profiler and the CUDA allocator know beyond their documented interfaces.

Seen in PyTorch 2.11 to 2.13; the CUDA allocator's history on no GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled

is_profiler_enabled = _profiler_enabled
"""Whether a profiler runs on this thread."""

cpu_device_type = DeviceType.CPU
"""What the profiler's events of the CPU say of their device."""


def is_cuda_history_recorded() -> bool:
    """Whether the program records the CUDA allocator's history."""
    # where CUDA is not initialized there is no allocator, and PyTorch crashes for asking it
    return torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled()


def record_cuda_history(max_entries: int) -> None:
    """Begin to record the CUDA allocator's history, without stacks."""
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=max_entries, clear_history=True)


def cuda_history_events() -> list[list[dict[str, Any]]]:
    """For each device its allocator's events so far: ``action``, ``size`` in bytes, ``time_us``."""
    snapshot: Any = torch.cuda.memory._snapshot()
    return dict(snapshot).get("device_traces", [])


def stop_cuda_history() -> None:
    """Record no longer."""
    torch.cuda.memory._record_memory_history(None)


def on_cuda_out_of_memory(observer: Callable[[int, int], None]) -> None:
    """Call ``observer(device index, bytes asked for)`` whenever CUDA's allocator gives up, for good; what it
    raises is lost. CUDA has to be initialized.
    """

    def observe(device: int, asked_bytes: int, *_: int) -> None:
        observer(device, asked_bytes)

    torch._C._cuda_attach_out_of_memory_observer(observe)  # pyright: ignore


occupy_gpu: Any = torch.cuda._sleep  # pyright: ignore
"""Queue a kernel on the current CUDA stream that does nothing for so many cycles of the GPU's clock."""
