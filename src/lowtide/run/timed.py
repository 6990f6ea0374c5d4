"""A recorder that knows how long it takes itself, for the few steps that are timed."""

from __future__ import annotations

import time
from typing import Any

import torch

from lowtide.run.follow import Follower


class TimedRecorder(Follower):
    """Adds what recording takes, the operations themselves apart, to its watch's ``recording_seconds``.

    Between the operations of a real step the interpreter finds the processor's caches full of other things,
    so this is more than what a tiny model shows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kernels = 0.0

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one operation, and add up what recording took."""
        assert self.watch is not None
        self.watch.entries += 1
        begin, kernels = time.perf_counter(), self._kernels
        try:
            return super().operation(func, args, kwargs)
        finally:
            self.watch.recording_seconds += time.perf_counter() - begin - (self._kernels - kernels)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin = time.perf_counter()
        try:
            return super()._call(func, args, kwargs)
        finally:
            self._kernels += time.perf_counter() - begin

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves ``tensor``."""
        assert self.watch is not None
        self.watch.entries += 1
        begin = time.perf_counter()
        try:
            return super().pack(tensor)
        finally:
            self.watch.recording_seconds += time.perf_counter() - begin
