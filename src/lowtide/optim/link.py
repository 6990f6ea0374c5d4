"""The way between device and host: everything that depends on the kind of device stands here.

`DirectLink` is for a device whose memory the host's processor works on itself (a CPU), `CudaLink` for CUDA,
and `ThrottledLink` treats main memory as a device at the far end of a slow link, for tests and benchmarks.
Transfers are those of `lowtide.store.lanes`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Event, Tensor

from lowtide.optim.errors import OptimError
from lowtide.store.lanes import StreamLane, Streams, ThreadLane, Transfer, finished
from lowtide.store.pool import MemoryPool

_SLEEP_SECONDS = 1e-3
"""By how much a sleep may last longer than asked."""

Lane = Literal["down", "up", "device", "host"]

WHAT = "the optimizer's host part"


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


@dataclass
class Link(ABC):
    """Moves stretches of tensors between device and host.

    Attributes:
        bytes_down: moved from device to host so far.
        bytes_up: moved from host to device so far.
        log: when each transfer and update happened, where the link records it (`ThrottledLink` does).
    """

    bytes_down: int = 0
    bytes_up: int = 0
    log: list[Move] = field(default_factory=list)

    direct = False
    """Whether the host's processor works on the device's memory, so that nothing has to move."""

    parallel = True
    """Whether device and host compute side by side."""

    pins = False
    """Whether transfers want page-locked host memory."""

    def memory(self, limit_bytes: int | None = None) -> MemoryPool:
        """Host memory as transfers want it."""
        remedy = "lower host_fraction, or use host='disk'"
        return MemoryPool(WHAT, remedy, OptimError, limit_bytes, "pinned" if self.pins else "tensors")

    @abstractmethod
    def down(self, host: Tensor, device: Tensor) -> Transfer:
        """Copy a stretch from the device to the host, after the work on the device that is already asked
        for.
        """

    @abstractmethod
    def up(self, device: Tensor, host: Tensor) -> Transfer:
        """Copy a stretch from the host to the device."""

    def begin_step(self) -> None:  # noqa: B027
        """An update begins: what goes up from now on may overwrite what the device has been asked to read
        until now.
        """

    def on_device(self, work: Callable[[], None], elements: int) -> Transfer:
        """Let the device update ``elements`` elements."""
        work()
        return finished()

    def on_host(self, work: Callable[[], None], elements: int) -> None:
        """Update ``elements`` elements on the host, now, in the calling thread."""
        work()

    def settle(self) -> None:  # noqa: B027
        """What the device is asked to do from now on sees everything that went up."""

    def synchronize(self) -> None:  # noqa: B027
        """Return when the device has done all it was asked to."""

    def close(self) -> None:  # noqa: B027
        """Let go of threads."""


class DirectLink(Link):
    """Device memory is main memory: the host's processor updates parameters where they lie; only what lies on
    disk is copied.
    """

    direct = True
    parallel = False

    def down(self, host: Tensor, device: Tensor) -> Transfer:
        host.copy_(device)
        self.bytes_down += host.nbytes
        return finished()

    def up(self, device: Tensor, host: Tensor) -> Transfer:
        device.copy_(host)
        self.bytes_up += device.nbytes
        return finished()


class ThrottledLink(Link):
    """Main memory as a device at the far end of a link, both ways at once, each lane a thread.

    Everything is really copied and computed, and takes at least as long as the given rates say: so schedules,
    bytes and waits are those of a device with its own memory. Sleeping holds no processor.

    Args:
        down_bytes_per_second, up_bytes_per_second: of the two directions; ``None`` is as fast as memory.
        device_elements_per_second, host_elements_per_second: updates; ``None`` is as fast as the processor.
    """

    def __init__(
        self,
        down_bytes_per_second: float | None = None,
        up_bytes_per_second: float | None = None,
        device_elements_per_second: float | None = None,
        host_elements_per_second: float | None = None,
    ) -> None:
        super().__init__()
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


class CudaLink(Link):
    """CUDA: a stream each way, ordered against the computing stream by events; host memory is page-locked.

    Args:
        device: where parameters lie.
        streams: the device's; found without it.
    """

    pins = True

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        super().__init__()
        self.device = device
        self.streams = streams if streams is not None else Streams(device)
        self._down, self._up = StreamLane(self.streams), StreamLane(self.streams)
        self._ready: tuple[Event, ...] = ()
        """within a step: what copies wait for, so that none waits for the device's own update"""

    def down(self, host: Tensor, device: Tensor) -> Transfer:
        self.bytes_down += host.nbytes
        return self._down.copy([(host, device)], device, self._ready)

    def up(self, device: Tensor, host: Tensor) -> Transfer:
        self.bytes_up += device.nbytes
        return self._up.copy([(device, host)], device, self._ready)

    def begin_step(self) -> None:
        self._ready = (self.streams.mark(self.streams.current()),)

    def settle(self) -> None:
        self.streams.order(self.streams.current(), self.streams.mark(self._up.stream))
        self._ready = ()

    def synchronize(self) -> None:
        self.streams.synchronize()


def link_for(device: torch.device) -> Link:
    """The link between the host and a device.

    Raises:
        OptimError: lowtide knows no way to it.
    """
    if device.type == "cpu":
        return DirectLink()
    if device.type == "cuda":
        return CudaLink(device)
    raise OptimError(
        f"HostOptimizer reaches parameters on cpu and cuda devices, not on {device}: pass link= with a Link "
        "of your own"
    )
