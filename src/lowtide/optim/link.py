"""The way between device and host: everything that depends on the kind of device stands here.

`DirectLink` is for a device whose memory the host's processor works on itself (a CPU), `CudaLink` for CUDA.
Transfers are those of `lowtide.extensions.moves.store.lanes`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Event, Tensor

from lowtide.accelerator import Streams, is_accelerator
from lowtide.extensions.moves.store.lanes import StreamLane, Transfer, no_transfer
from lowtide.optim.errors import OptimError
from lowtide.optim.pool import MemoryPool


@dataclass
class Link(ABC):
    """Moves stretches of tensors between device and host.

    Attributes:
        bytes_down: moved from device to host so far.
        bytes_up: moved from host to device so far.
    """

    bytes_down: int = 0
    bytes_up: int = 0

    direct = False
    """Whether the host's processor works on the device's memory, so that nothing has to move."""

    parallel = True
    """Whether device and host compute side by side."""

    def memory(self, limit_bytes: int | None = None) -> MemoryPool:
        """Host memory as transfers want it."""
        return MemoryPool(limit_bytes)

    @abstractmethod
    def down(self, host: Tensor, device: Tensor) -> Transfer:
        """Copy a stretch from the device to the host, after the work on the device that is already asked
        for.
        """

    def ready(self) -> object:  # noqa: B027
        """A mark for `down_after`: the work on the device that is already asked for."""

    def down_after(self, ready: object, host: Tensor, device: Tensor) -> Transfer:
        """As `down`, from any thread: after the work that was asked for when `ready` gave the mark."""
        return self.down(host, device)

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
        return no_transfer()

    def on_host(self, work: Callable[[], None], elements: int) -> None:
        """Update ``elements`` elements on the host, now, in the calling thread."""
        work()

    def settle(self) -> None:  # noqa: B027
        """An update is over, what went up has arrived: copies wait again for what the device was asked."""

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
        return no_transfer()

    def up(self, device: Tensor, host: Tensor) -> Transfer:
        device.copy_(host)
        self.bytes_up += device.nbytes
        return no_transfer()


class CudaLink(Link):
    """CUDA: a stream each way, ordered against the computing stream by events; host memory is page-locked.

    Args:
        device: where parameters lie.
        streams: the device's; found without it.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        super().__init__()
        self.device = device
        self.streams = streams if streams is not None else Streams(device)
        self._down, self._up = StreamLane(self.streams), StreamLane(self.streams)
        self._counting = threading.Lock()
        self._ready: tuple[Event, ...] = ()
        """within a step: what copies wait for, so that none waits for the device's own update"""

    def memory(self, limit_bytes: int | None = None) -> MemoryPool:
        return MemoryPool(limit_bytes, self.device)

    def down(self, host: Tensor, device: Tensor) -> Transfer:
        return self.down_after(self._ready, host, device)

    def ready(self) -> tuple[Event, ...]:
        return self._ready or (self.streams.mark(self.streams.current()),)

    def down_after(self, ready: Any, host: Tensor, device: Tensor) -> Transfer:
        with self._counting:  # one thread sends gradients, another fetches those that are added
            self.bytes_down += host.nbytes
            return self._down.copy([(host, device)], device, ready)

    def up(self, device: Tensor, host: Tensor) -> Transfer:
        self.bytes_up += device.nbytes
        return self._up.copy([(device, host)], device, self._ready)

    def begin_step(self) -> None:
        self._ready = (self.streams.mark(self.streams.current()),)

    def settle(self) -> None:
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
    if is_accelerator(device):
        return CudaLink(device)
    raise OptimError(
        f"HostOptimizer reaches parameters on cpu and cuda devices, not on {device}: pass link= with a Link "
        "of your own"
    )
