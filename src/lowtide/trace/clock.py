"""Seconds of a single call, on the host or on a GPU's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lowtide import accelerator, private

_CYCLES = 200_000
"""A GPU is busy for 0.1 ms with these at 2 GHz; what queues a call through Python takes a half of that."""


class Clock:
    """Times calls without waiting for a GPU: what it says is read later.

    A small kernel has ended before the host has launched what follows, and two events around it would say how
    long the launch takes. So the GPU is kept busy until all three are queued: then they run back to back.

    On a CPU it counts what the calling thread computes, which takes part in each parallel loop. Neither other
    programs count, nor other ranks that a collective waits for.

    Args:
        device: where the calls run.

    Example:
        >>> result, seconds = Clock(torch.device("cpu")).time(lambda: torch.ones(2).sum())
        >>> result.item(), 0 < seconds() < 1
        (2.0, True)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def occupy(self) -> None:
        """Keep the GPU busy for about 0.1 ms."""
        private.occupy_gpu(_CYCLES, self._device)

    def event(self) -> Any:
        """An event that is queued now."""
        return accelerator.timed_event(self._device)

    def time(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """What the call returned, and a function that says how many seconds it took."""
        if not accelerator.is_accelerator(self._device):
            begin = time.thread_time()
            result = call()
            seconds = time.thread_time() - begin
            return result, lambda: seconds
        self.occupy()
        first = self.event()
        result = call()
        last = self.event()

        def read() -> float:
            last.synchronize()
            return first.elapsed_time(last) * 1e-3

        return result, read
