"""Transfers between device and host. All code of the optimizer that depends on the kind of device is here.

`DirectLink` is for a CPU as the device: the host's processor reads and writes its memory. `CudaLink` is for
CUDA. Transfers are those of `lowtide.extensions.moves.store.lanes`.
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
    """Copies slices of tensors between device and host, and runs updates on both.

    "Down" means from the device to the host, "up" from the host to the device. An update calls `begin_step`
    first and `settle` last. Between them it calls `down`, `on_host` and `up` for each batch of the host's
    part, and `on_device` for the device's part.

    Attributes:
        bytes_down: bytes copied from device to host so far.
        bytes_up: bytes copied from host to device so far.
    """

    bytes_down: int = 0
    bytes_up: int = 0

    direct = False
    """Whether the host's processor works on the device's memory itself, so that nothing is copied."""

    parallel = True
    """Whether device and host compute at the same time."""

    def memory(self, limit_bytes: int | None = None) -> MemoryPool:
        """A pool of host memory for the copies, of at most ``limit_bytes``; page-locked for CUDA."""
        return MemoryPool(limit_bytes)

    @abstractmethod
    def down(self, host: Tensor, device: Tensor) -> Transfer:
        """Copy ``device`` to ``host``. The copy begins after the work that the device's current stream has
        already.
        """

    def ready(self) -> object:  # noqa: B027
        """A mark in the device's current stream, for `down_after`."""

    def down_after(self, ready: object, host: Tensor, device: Tensor) -> Transfer:
        """As `down`, from any thread. The copy begins after the work that the stream had when `ready` made
        the mark.
        """
        return self.down(host, device)

    @abstractmethod
    def up(self, device: Tensor, host: Tensor) -> Transfer:
        """Copy ``host`` to ``device``."""

    def begin_step(self) -> None:  # noqa: B027
        """An update begins. Until `settle`, each copy waits for the work that the device has at this moment,
        and not for the device's own part of the update.
        """

    def on_device(self, work: Callable[[], None], elements: int) -> Transfer:
        """Run ``work``, which updates ``elements`` elements on the device."""
        work()
        return no_transfer()

    def on_host(self, work: Callable[[], None], elements: int) -> None:
        """Run ``work``, which updates ``elements`` elements on the host, in the calling thread."""
        work()

    def settle(self) -> None:  # noqa: B027
        """The update is over, and its copies have arrived. Later copies wait for the work that the device has
        when they begin.
        """

    def synchronize(self) -> None:  # noqa: B027
        """Wait until the device has finished its work."""

    def close(self) -> None:  # noqa: B027
        """End the link's threads."""


class DirectLink(Link):
    """For a CPU: device memory is main memory. The host's processor updates parameters in place. Only state
    on the disk is copied.
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
    """For CUDA: one stream for each direction. Events order copies against the stream that computes. Host
    memory is page-locked.

    Args:
        device: the parameters' device.
        streams: the device's streams. The default is made for ``device``.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        super().__init__()
        self.device = device
        self.streams = streams if streams is not None else Streams(device)
        self._down, self._up = StreamLane(self.streams), StreamLane(self.streams)
        self._counting = threading.Lock()
        self._ready: tuple[Event, ...] = ()
        """During an update: the event that copies wait for, so that none waits for the device's own part."""

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
        OptimError: lowtide has no link for this kind of device.
    """
    if device.type == "cpu":
        return DirectLink()
    if is_accelerator(device):
        return CudaLink(device)
    raise OptimError(
        f"HostOptimizer reaches parameters on cpu and cuda devices, not on {device}: pass link= with a Link "
        "of your own"
    )
