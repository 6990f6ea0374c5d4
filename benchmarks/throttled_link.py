"""A stand-in for a device with its own memory, for tests and benchmarks of the host optimizer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lowtide.extensions.moves.store.lanes import ThreadLane, Transfer
from lowtide.optim import Link

_SLEEP_SECONDS = 1e-3
"""By how much a sleep may last longer than asked."""

Lane = Literal["down", "up", "device", "host"]


@dataclass(frozen=True)
class Move:
    """Something that happened on a lane: a transfer, or an update.

    Attributes:
        lane: ``down`` is device to host, ``up`` host to device, ``device`` and ``host`` are updates there.
        begin, end: seconds of `time.perf_counter`.
        size: bytes moved, or elements updated.
    """

    lane: Lane
    begin: float
    end: float
    size: int


class ThrottledLink(Link):
    """Main memory as a device at the far end of a link, both ways at once, each lane a thread.

    Everything is really copied and computed, and takes at least as long as the given rates say: so schedules,
    bytes and waits are those of a device with its own memory. Sleeping holds no processor.

    Args:
        down_bytes_per_second, up_bytes_per_second: of the two directions; ``None`` is as fast as memory.
        device_elements_per_second, host_elements_per_second: updates; ``None`` is as fast as the processor.

    Attributes:
        log: when each transfer and update happened.
    """

    def __init__(
        self,
        down_bytes_per_second: float | None = None,
        up_bytes_per_second: float | None = None,
        device_elements_per_second: float | None = None,
        host_elements_per_second: float | None = None,
    ) -> None:
        super().__init__()
        self.log: list[Move] = []
        self.rates: dict[Lane, float | None] = {
            "down": down_bytes_per_second,
            "up": up_bytes_per_second,
            "device": device_elements_per_second,
            "host": host_elements_per_second,
        }
        lanes: tuple[Lane, ...] = ("down", "up", "device")
        self._lanes = {lane: ThreadLane(lane) for lane in lanes}
        self._lock = threading.Lock()
        self._open: list[Transfer] = []
        self._free: dict[Lane, float] = dict.fromkeys(self.rates, 0.0)

    def down(self, host: Tensor, device: Tensor) -> Transfer:
        self.bytes_down += host.nbytes
        return self._run("down", lambda: host.copy_(device), host.nbytes)

    def up(self, device: Tensor, host: Tensor) -> Transfer:
        self.bytes_up += device.nbytes
        return self._run("up", lambda: device.copy_(host), device.nbytes)

    def on_device(self, work: Callable[[], None], elements: int) -> Transfer:
        return self._run("device", work, elements)

    def on_host(self, work: Callable[[], None], elements: int) -> None:
        self._timed("host", work, elements)

    def settle(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for every lane, and raise what one of them raised."""
        with self._lock:
            waiting, self._open = self._open, []
        for lane in self._lanes.values():
            lane.do(lambda: None).wait()
        for transfer in waiting:
            transfer.wait()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def _run(self, lane: Lane, work: Callable[[], Any], size: int) -> Transfer:
        transfer = self._lanes[lane].do(lambda: self._timed(lane, work, size))
        with self._lock:
            self._open = [other for other in self._open if not other.done or other.error is not None]
            self._open.append(transfer)
        return transfer

    def _timed(self, lane: Lane, work: Callable[[], Any], size: int) -> None:
        """Do the work and then sleep, so that a lane that is kept busy runs at its rate on the average,
        however coarse sleeps are.
        """
        begin = time.perf_counter()
        with torch.no_grad():
            work()
        rate = self.rates[lane]
        if rate is not None:
            busy = begin - self._free[lane] < _SLEEP_SECONDS
            due = (self._free[lane] if busy else begin) + size / rate
            self._free[lane] = due
            left = due - time.perf_counter()
            if left > 0:
                time.sleep(left)
        self.log.append(Move(lane, begin, time.perf_counter(), size))
