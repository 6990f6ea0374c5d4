"""Memory on CUDA: the caching allocator's own statistics, which know one peak per device and which any
number of readers share here; and the workspaces of cuBLAS.

PyTorch takes a workspace from its allocator for each thread that multiplies, and keeps it: 32 MiB on a
Hopper, 8.1 MiB on most others. A training step multiplies on two threads, forward's and the one on which
autograd runs backward for the device. From the first product of matrices on they are resident.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, NamedTuple

import torch

from lowtide import private

from .allocator import LiveSource, Moments, Peak

_LOCK = threading.Lock()
_MAX_EVENTS = 200_000


class _Statistics(NamedTuple):
    """What a device's allocator says of itself, in bytes; ``most`` since its statistics were last reset.

    Attributes:
        requested: those that were asked for and are live, as a plan counts them. Beside a large tensor the
            allocator may keep a rest of up to 1 MiB in its block, which is no part of them.
        allocated: whole blocks of the live ones.
        reserved: what it holds of the device.
    """

    requested: int
    most_requested: int
    allocated: int
    most_allocated: int
    reserved: int
    most_reserved: int


def _statistics(index: int) -> _Statistics:
    """One reading of a device's allocator."""
    found = torch.cuda.memory_stats_as_nested_dict(index)
    # cudaMallocAsync counts no requests: its blocks are what there is
    asked = "requested_bytes" if torch.cuda.get_allocator_backend() == "native" else "allocated_bytes"
    counts = [found[name]["all"] for name in (asked, "allocated_bytes", "reserved_bytes")]
    return _Statistics(*(count[which] for count in counts for which in ("current", "peak")))


class CudaPeak(Peak):
    """A peak register of one device, in the bytes that were requested; a timeline is the allocator's event
    history, without stacks.

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
            now = self._fold()
            self._start = self._most = now.requested
            self._allocated_start = self._allocated = now.allocated
            self._reserved = now.reserved
            self._all.setdefault(self._at, []).append(self)
            torch.cuda.reset_peak_memory_stats(self._at)

    def _close(self) -> tuple[tuple[int, int], Moments]:
        bytes_ = self._read()
        with _LOCK:
            self._all[self._at].remove(self)
        return bytes_, self._moments() if self._recorded else ()

    def _fold(self) -> _Statistics:
        """Hand the device's peaks to every open register; returns what was read."""
        now = _statistics(self._at)
        for other in self._all.get(self._at, []):
            other._most = max(other._most, now.most_requested)
            other._allocated = max(other._allocated, now.most_allocated)
            other._reserved = max(other._reserved, now.most_reserved)
        return now

    def _read(self) -> tuple[int, int]:
        with _LOCK:
            now = self._fold()
            return self._most - self._start, now.requested - self._start

    def live_source(self) -> LiveSource:
        if torch.cuda.get_allocator_backend() != "native":
            return super().live_source()
        return torch.device("cuda", self._at), self._start

    @property
    def allocated_bytes(self) -> int | None:
        """Most bytes of whole blocks so far, above those at entry."""
        self._now()
        return self._allocated - self._allocated_start

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
            size = int(event["size"])  # as requested
            live += size if event["action"] == "alloc" else -size
            moments.append(((event["time_us"] - steps[0]["time_us"]) * 1e-6, live))
        return tuple(moments)


class _Taken(threading.local):
    """The devices and streams on which this thread, and backwards that it begins, have their workspaces."""

    def __init__(self) -> None:
        self.where: set[tuple[int | None, int]] = set()


_TAKEN = _Taken()


def take_workspaces(device: torch.device) -> None:
    """Allocate the cuBLAS workspaces of steps on this thread and the current stream, if they are not yet."""
    at = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    where = at.index, torch.cuda.current_stream(at).cuda_stream
    if where not in _TAKEN.where:
        _TAKEN.where.add(where)
        with torch.enable_grad():
            one = torch.ones(1, device=at, requires_grad=True)
            _Takes.apply(one).backward()  # type: ignore[union-attr]


class _Takes(torch.autograd.Function):
    """Allocates workspaces: of forward's thread in its forward, of backward's in its backward."""

    @staticmethod
    def forward(_: Any, one: torch.Tensor) -> torch.Tensor:
        private.take_blas_workspaces(one.device)
        return one.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        private.take_blas_workspaces(gradient.device)
        return gradient
