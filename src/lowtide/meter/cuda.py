"""Memory on CUDA: the caching allocator's own statistics, which know one peak per device; here it is shared
by any number of readers.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch

from .errors import MeterError

_LOCK = threading.Lock()
_BLOCK = 512
_MAX_EVENTS = 200_000


class CudaMark:
    """A peak register of one device. Opening one resets the device's peak statistic
    (`torch.cuda.reset_peak_memory_stats`), after handing what it read to every register that is open: each
    sees its own peak."""

    # the statistic is the device's, so its readers are listed per device
    _open: ClassVar[dict[int, list[CudaMark]]] = {}

    def __init__(self, device: torch.device) -> None:
        self.device = device.index if device.index is not None else torch.cuda.current_device()
        self._peak = self._peak_reserved = self._start = self._count = 0

    def open(self) -> None:
        """Start counting."""
        with _LOCK:
            marks = self._open.setdefault(self.device, [])
            self._fold()
            self._start = self._peak = torch.cuda.memory_allocated(self.device)
            self._peak_reserved = torch.cuda.memory_reserved(self.device)
            self._count = self._allocated()
            marks.append(self)
            torch.cuda.reset_peak_memory_stats(self.device)

    def close(self) -> None:
        """Stop counting."""
        with _LOCK:
            self._fold()
            self._open[self.device].remove(self)

    def _fold(self) -> None:
        peak, reserved = (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
        )
        for mark in self._open.get(self.device, []):
            mark._peak, mark._peak_reserved = max(mark._peak, peak), max(mark._peak_reserved, reserved)

    def _allocated(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("allocation.all.allocated", 0))

    def read(self) -> tuple[int, int, int, int, int]:
        """Peak and live bytes above the start, start bytes, most reserved bytes, blocks allocated."""
        with _LOCK:
            if self in self._open.get(self.device, []):
                self._fold()
            live = torch.cuda.memory_allocated(self.device) - self._start
            return (
                self._peak - self._start,
                live,
                self._start,
                self._peak_reserved,
                self._allocated() - self._count,
            )


class CudaTimeline:
    """The allocator's event history between `start` and `stop`, without stack traces. Taken only where nobody
    records it already.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.recording = False

    def start(self) -> None:
        """Begin, unless the program records its own memory history."""
        if torch._C._cuda_isHistoryEnabled():
            return
        torch.cuda.memory._record_memory_history(
            "all", context=None, max_entries=_MAX_EVENTS, clear_history=True
        )
        self.recording = True

    def stop(self) -> tuple[tuple[float, int], ...]:
        """End; (seconds since the first event, bytes live above the start), sizes rounded up to the
        allocator's 512 bytes.
        """
        if not self.recording:
            return ()
        try:
            traces: Any = dict(torch.cuda.memory._snapshot()).get("device_traces", [])
        finally:
            torch.cuda.memory._record_memory_history(None)
        steps = (
            [e for e in traces[self.device] if e["action"] in ("alloc", "free_requested")]
            if self.device < len(traces)
            else []
        )
        live, events = 0, []
        for event in steps:
            size = -(-int(event["size"]) // _BLOCK) * _BLOCK
            live += size if event["action"] == "alloc" else -size
            events.append(((event["time_us"] - steps[0]["time_us"]) * 1e-6, live))
        return tuple(events)


def check(device: torch.device) -> None:
    """Raises MeterError where CUDA is not there."""
    if not torch.cuda.is_available():
        raise MeterError(f"memory on {device} cannot be measured: this process has no CUDA device")
