"""Memory on CUDA: the caching allocator's own statistics, which know one peak per device and which any
number of readers share here; and the workspaces of cuBLAS.

PyTorch takes a workspace from its allocator for each thread that multiplies, and keeps it: 32 MiB on a
Hopper, 8.1 MiB on most others. A training step multiplies on two threads, forward's and the one on which
autograd runs backward for the device. From the first product of matrices on they are resident.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch

from lowtide import private

from .register import Moments, Peak

_LOCK = threading.Lock()
_BLOCK = 512
"""The allocator rounds sizes up to so many bytes."""
_MAX_EVENTS = 200_000


class CudaPeak(Peak):
    """A peak register of one device; a timeline is the allocator's event history, without stacks.

    Opening one resets the device's peak statistics (`torch.cuda.reset_peak_memory_stats`), after handing
    what it read to every register that is open: each sees its own peak.
    """

    source = "cuda"
    # the statistic is the device's, so its readers are listed per device
    _all: ClassVar[dict[int, list[CudaPeak]]] = {}
    _recorded = False

    def _open(self) -> None:
        torch.cuda.init()  # before, its allocator has no statistics, and asking for its history crashes
        self._at = self.device.index if self.device.index is not None else torch.cuda.current_device()
        if self.with_timeline and not private.is_cuda_history_recorded():  # else the program records its own
            self._recorded = True
            private.record_cuda_history(_MAX_EVENTS)
        with _LOCK:
            self._fold()
            self._start = self._most = torch.cuda.memory_allocated(self._at)
            self._reserved = torch.cuda.memory_reserved(self._at)
            self._all.setdefault(self._at, []).append(self)
            torch.cuda.reset_peak_memory_stats(self._at)

    def _close(self) -> tuple[tuple[int, int], Moments]:
        bytes_ = self._read()
        with _LOCK:
            self._all[self._at].remove(self)
        return bytes_, self._moments() if self._recorded else ()

    def _fold(self) -> None:
        """Hand the device's peaks to every open register."""
        peak = torch.cuda.max_memory_allocated(self._at)
        reserved = torch.cuda.max_memory_reserved(self._at)
        for other in self._all.get(self._at, []):
            other._most, other._reserved = max(other._most, peak), max(other._reserved, reserved)

    def _read(self) -> tuple[int, int]:
        with _LOCK:
            self._fold()
            return self._most - self._start, torch.cuda.memory_allocated(self._at) - self._start

    @property
    def reserved_bytes(self) -> int | None:
        """The most that the allocator held of the device so far."""
        self._now()
        return self._reserved

    def _moments(self) -> Moments:
        """The allocator's events, which are recorded no longer; the seconds count from the first."""
        try:
            traces = private.cuda_history_events()
        finally:
            private.stop_cuda_history()
        events = traces[self._at] if self._at < len(traces) else []
        steps = [event for event in events if event["action"] in ("alloc", "free_requested")]
        live, moments = 0, []
        for event in steps:
            size = -(-int(event["size"]) // _BLOCK) * _BLOCK
            live += size if event["action"] == "alloc" else -size
            moments.append(((event["time_us"] - steps[0]["time_us"]) * 1e-6, live))
        return tuple(moments)


_THREADS = 2


class _Taken(threading.local):
    """On which devices and streams this thread and backward's have theirs."""

    def __init__(self) -> None:
        self.where: set[tuple[int | None, int]] = set()


_TAKEN = _Taken()


def workspace_bytes(device: torch.device) -> int:
    """Bytes of the workspaces of a training step on ``device``; 0 where there are none, as on a CPU."""
    return _THREADS * private.blas_workspace_bytes(device)


def standing_workspace_bytes(device: torch.device) -> int:
    """The same, of a step that runs on this thread and the current stream: from here on they stand.

    So they are no part of what a step that is watched from here on allocates, be it the first.
    """
    count = workspace_bytes(device)
    if count and device.type == "cuda":
        at = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        where = at.index, torch.cuda.current_stream(at).cuda_stream
        if where not in _TAKEN.where:
            _TAKEN.where.add(where)
            with torch.enable_grad():
                _Takes.apply(torch.ones(1, device=at, requires_grad=True)).backward()  # type: ignore[union-attr]
    return count


class _Takes(torch.autograd.Function):
    """Multiplies on forward's thread and on backward's."""

    @staticmethod
    def forward(_: Any, one: torch.Tensor) -> torch.Tensor:
        private.take_blas_workspaces(one.device)
        return one.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        private.take_blas_workspaces(gradient.device)
        return gradient
