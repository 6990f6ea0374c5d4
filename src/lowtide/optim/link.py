"""The way between device and host: everything that depends on the kind of device stands here.

`DirectLink` is for a device whose memory the host's processor works on itself (a CPU), `CudaLink` for CUDA,
and `ThrottledLink` treats main memory as a device at the far end of a slow link, for tests and benchmarks.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

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


class Transfer(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the host may read what was written, or reuse what was read."""
        ...


class Done:
    """A transfer that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""


DONE = Done()


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
        return DONE

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
        return DONE

    def up(self, device: Tensor, host: Tensor) -> Transfer:
        device.copy_(host)
        self.bytes_up += device.nbytes
        return DONE


class _Running:
    """A transfer that another thread carries out."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait for the thread, and raise what it raised."""
        self._future.result()


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
        self._lanes: dict[Lane, ThreadPoolExecutor] = {
            lane: ThreadPoolExecutor(1, f"lowtide-{lane}") for lane in ("down", "up", "device")
        }
        self._lock = threading.Lock()
        self._open: list[Future[Any]] = []
        self._free: dict[Lane, float] = dict.fromkeys(("down", "up", "device", "host"), 0.0)

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
        wait(waiting)
        for future in waiting:
            future.result()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.shutdown(wait=True)

    def _run(self, lane: Lane, work: Callable[[], Any], size: int) -> Transfer:
        future = self._lanes[lane].submit(self._timed, lane, work, size)
        with self._lock:
            self._open = [other for other in self._open if not other.done() or other.exception() is not None]
            self._open.append(future)
        return _Running(future)

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
    """CUDA: a stream each way, ordered against the computing stream by events; host memory is page-locked."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        self._ready: Any = None

    def down(self, host: Tensor, device: Tensor) -> Transfer:
        self.bytes_down += host.nbytes
        return self._copy(self._down, host, device)

    def up(self, device: Tensor, host: Tensor) -> Transfer:
        self.bytes_up += device.nbytes
        return self._copy(self._up, device, host)

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> Transfer:
        if self._ready is not None:  # within a step nothing waits for the device's own update
            stream.wait_event(self._ready)
        else:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return _Recorded(event)

    def begin_step(self) -> None:
        self._ready = torch.cuda.current_stream(self.device).record_event()

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._up)
        self._ready = None

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class _Recorded:
    """A transfer that a CUDA stream carries out."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Wait for the stream to pass the event."""
        self._event.synchronize()


def link_for(device: torch.device) -> Link:
    """The link between the host and a device.

    Raises:
        OptimError: lowtide knows no way to it.
    """
    from lowtide.optim.errors import OptimError

    if device.type == "cpu":
        return DirectLink()
    if device.type == "cuda":
        return CudaLink(device)
    raise OptimError(
        f"HostOptimizer reaches parameters on cpu and cuda devices, not on {device}: pass link= with a Link "
        "of your own"
    )
