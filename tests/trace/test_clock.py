"""A small kernel of a GPU is timed, and not what queues it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.trace.clock import Clock


class Stream(Clock):
    """A clock on a GPU's stream without a GPU: what is queued begins when it is there and what is before has
    ended.
    """

    LAUNCH, KERNEL, BUSY = 8e-6, 2e-6, 100e-6

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))
        self.host = self.ends = 0.0

    def queue(self, seconds: float) -> float:
        self.host += self.LAUNCH
        self.ends = max(self.host, self.ends) + seconds
        return self.ends

    def occupy(self) -> None:
        self.queue(self.BUSY)

    def event(self) -> Any:
        at = self.queue(0.0)
        return SimpleNamespace(
            at=at, synchronize=lambda: None, elapsed_time=lambda later, at=at: (later.at - at) * 1e3
        )


def test_a_small_kernel_on_a_gpu_is_timed_and_not_its_launch() -> None:
    stream = Stream()
    for _ in range(3):
        result, seconds = stream.time(lambda: stream.queue(Stream.KERNEL))
        assert seconds() == pytest.approx(Stream.KERNEL) and result == stream.ends
    assert stream.host < 20 * Stream.LAUNCH, "the host never waited"
