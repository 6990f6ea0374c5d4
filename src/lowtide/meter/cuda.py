"""Memory on CUDA: the caching allocator's own statistics, which know one peak per device; here it is shared
by any number of readers.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import ClassVar

import torch

from lowtide import private

from .reading import Moments, Reading

_LOCK = threading.Lock()
_BLOCK = 512
"""The allocator rounds sizes up to so many bytes."""
_MAX_EVENTS = 200_000


class CudaRegister:
    """A peak register of one device.

    Opening one resets the device's peak statistics (`torch.cuda.reset_peak_memory_stats`), after handing
    what it read to every register that is open: each sees its own peak.

    Args:
        device: whose memory.
        timeline: whether to take the allocator's event history, without stacks.
    """

    # the statistic is the device's, so its readers are listed per device
    _open: ClassVar[dict[int, list[CudaRegister]]] = {}

    def __init__(self, device: torch.device, timeline: bool = False) -> None:
        self.device = device.index if device.index is not None else torch.cuda.current_device()
        self._timeline, self._recorded = timeline, False
        self._peak = self._start = 0

    def open(self) -> None:
        """Begin."""
        if self._timeline and not private.is_cuda_history_recorded():  # else the program records its own
            self._recorded = True
            private.record_cuda_history(_MAX_EVENTS)
        with _LOCK:
            self._fold()
            self._start = self._peak = torch.cuda.memory_allocated(self.device)
            self._open.setdefault(self.device, []).append(self)
            torch.cuda.reset_peak_memory_stats(self.device)

    def close(self) -> Reading:
        """End, and say what there was."""
        found = self.read()
        with _LOCK:
            self._open[self.device].remove(self)
        if self._recorded:
            found = replace(found, timeline=self._moments())
        return found

    def _fold(self) -> None:
        """Hand the device's peaks to every open register."""
        peak = torch.cuda.max_memory_allocated(self.device)
        for other in self._open.get(self.device, []):
            other._peak = max(other._peak, peak)

    def read(self) -> Reading:
        """What there was so far."""
        with _LOCK:
            self._fold()
            live = torch.cuda.memory_allocated(self.device) - self._start
            return Reading(self._peak - self._start, live)

    def _moments(self) -> Moments:
        """The allocator's events, which are recorded no longer; the seconds count from the first."""
        try:
            traces = private.cuda_history_events()
        finally:
            private.stop_cuda_history()
        events = traces[self.device] if self.device < len(traces) else []
        steps = [event for event in events if event["action"] in ("alloc", "free_requested")]
        live, moments = 0, []
        for event in steps:
            size = -(-int(event["size"]) // _BLOCK) * _BLOCK
            live += size if event["action"] == "alloc" else -size
            moments.append(((event["time_us"] - steps[0]["time_us"]) * 1e-6, live))
        return tuple(moments)
