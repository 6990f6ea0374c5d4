"""What the profiler, the CUDA allocator and cuBLAS know beyond their documented interfaces.

Seen in PyTorch 2.11 to 2.13; the CUDA allocator's history and cuBLAS's workspaces on no GPU yet.
"""

from __future__ import annotations

import os
import re
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
    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=max_entries, clear_history=True)


def cuda_history_events() -> list[list[dict[str, Any]]]:
    """For each device its allocator's events so far: ``action``, ``size`` in bytes, ``time_us``."""
    snapshot: Any = torch._C._cuda_memorySnapshot(_NO_POOL)  # pyright: ignore
    return snapshot["device_traces"]


_NO_POOL = (1, 1)
"""Names no pool of the allocator: one for graphs has a 0 behind its number, a user's own before it. So a
snapshot holds no segments, which takes a millisecond for every fifty of their blocks.
"""


def stop_cuda_history() -> None:
    """Record no longer."""
    torch.cuda.memory._record_memory_history(None)


def cuda_allocator_state(device: torch.device) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How the native CUDA allocator is set, and what it holds of a device.

    Returns:
        Its settings: ``expandable_segments``, ``max_split_size`` in bytes, or -1,
        ``garbage_collection_threshold`` and ``roundup_power2_divisions``, by MiB; and the segments of the
        device, as of ``torch.cuda.memory_snapshot()``.
    """
    found: Any = torch.cuda.memory._snapshot()
    index = torch.cuda.current_device() if device.index is None else device.index
    return found["allocator_settings"], [one for one in found["segments"] if one["device"] == index]


def on_cuda_out_of_memory(observer: Callable[[int, int], None]) -> None:
    """Call ``observer(device index, bytes asked for)`` whenever CUDA's allocator gives up, for good; what it
    raises is lost. CUDA has to be initialized.
    """

    def observe(device: int, asked_bytes: int, *_: int) -> None:
        observer(device, asked_bytes)

    torch._C._cuda_attach_out_of_memory_observer(observe)  # pyright: ignore


def occupy_gpu(cycles: int, device: torch.device) -> None:
    """Queue a kernel on a CUDA device's current stream that does nothing for so many cycles of its clock."""
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)  # pyright: ignore


def blas_workspace_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that PyTorch keeps for cuBLAS and cuBLASLt for each thread and stream that
    multiplies matrices, from the first product on; 0 where there is no cuBLAS.
    """
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return 0
    size_of = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    shared = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0" if size_of is None else "1") == "1"
    own = 0 if shared else int(os.environ.get("CUBLASLT_WORKSPACE_SIZE", 1024)) << 10
    if size_of is not None:
        return size_of() + own
    parts = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if not parts:
        hopper = torch.cuda.get_device_capability(device) == (9, 0)
        parts = [(4096, 8)] if hopper else [(4096, 2), (16, 8)]
    return sum(int(size) * int(count) << 10 for size, count in parts) + own


def take_blas_workspaces(device: torch.device) -> None:
    """Multiply matrices, so that cuBLAS has this thread's workspaces, which `blas_workspace_bytes` counts."""
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()
        some = torch.ones(16, 16, device=device)
        torch.addmm(some[0], some, some)
