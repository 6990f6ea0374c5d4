"""Seconds of a single call, on the host or on a GPU's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Times calls without waiting for a GPU: what it says is read later.

    Args:
        device: where the calls run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def time(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """What the call returned, and a function that says how many seconds it took."""
        if not self._cuda:
            begin = time.perf_counter()
            result = call()
            seconds = time.perf_counter() - begin
            return result, lambda: seconds
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        result = call()
        last.record()

        def read() -> float:
            last.synchronize()
            return first.elapsed_time(last) * 1e-3

        return result, read
