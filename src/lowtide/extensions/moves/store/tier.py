"""What every tier does: take bytes in the background, give them back, count both.

A `Tier` hands out leases of one slab and moves bytes between device tensors and them.
`Tier.write` and `Tier.read` return a `Transfer` at once. A failed transfer never looks like a finished one.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Event

from lowtide.accelerator import streams_of
from lowtide.errors import LowtideError
from lowtide.extensions.moves.store.lanes import ThreadLane, Transfer
from lowtide.extensions.moves.store.slab import Arena, Lease


class StoreError(LowtideError, RuntimeError):
    """Bytes could not be stored or brought back; the message says what to do."""


@dataclass
class Counts:
    """What a tier has moved so far.

    Attributes:
        written_bytes, read_bytes: payload of the transfers that finished.
        slab_bytes: size of the slab now.
        allocations: how many times the slab was made or made larger.
    """

    written_bytes: int = 0
    read_bytes: int = 0
    slab_bytes: int = 0
    allocations: int = 0


class Tier(ABC):
    """A place for bytes outside the device.

    A released lease's pending write finishes before its bytes are used again: a lane works in order.

    Args:
        align: leases begin at multiples of this.
        device: whose bytes are kept.

    Attributes:
        name: ``host`` or ``disk``.
        counts: what was moved.
        align, device: as given.
        most_bytes: the largest that the slab may become; ``None`` for no limit.
    """

    name = ""
    most_bytes: int | None = None

    def __init__(self, align: int, device: torch.device | str) -> None:
        self.counts = Counts()
        self.device = torch.device(device)
        self.align = align
        self.streams = streams_of(self.device)
        self.arena = Arena(align)
        self._lock = threading.Lock()
        self._closed = False
        self._lanes = {way: ThreadLane(f"{self.name}-{way}") for way in ("write", "read")}

    # ---- leases ----------------------------------------------------------------------------------

    def expect(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Keep these places for what each step will take, and make the slab large enough for them at once.

        Args:
            offsets, sizes: of each buffer, in bytes; buffers that never live at once may overlap.

        Raises:
            StoreError: there is no room for it.
        """
        with self._lock:
            self.arena.expect(offsets, sizes)
            self._ensure(self.arena.static_bytes)

    def take(self, bytes_: int, number: int = -1) -> Lease:
        """Bytes of the slab: at the ``number``-th expected place, or elsewhere when that is taken.

        Raises:
            StoreError: there is no room.
        """
        with self._lock:
            if self._closed:
                raise StoreError(f"the {self.name} store is closed")
            lease = self.arena.take(bytes_, number)
            try:
                self._ensure(lease.end)
            except StoreError:
                del lease  # which the error's frames would hold
                raise
        return lease

    def has_room(self, wanted: Sequence[tuple[int, int]]) -> bool:
        """Whether all of these could be taken now.

        Args:
            wanted: (bytes, number) of each, as of `take`.
        """
        if self.most_bytes is None:
            return True
        with self._lock:
            leases = [self.arena.take(bytes_, number) for bytes_, number in wanted]
            return max((lease.end for lease in leases), default=0) <= self.most_bytes

    def _ensure(self, end: int) -> None:
        if end > self.counts.slab_bytes:
            self._grow(end)
            self.counts.slab_bytes = end
            self.counts.allocations += 1

    # ---- transfers -------------------------------------------------------------------------------

    def write(self, data: torch.Tensor, lease: Lease, at: int = 0) -> Transfer:
        """Start copying a flat tensor of bytes into a lease, from ``at`` (a multiple of the tier's
        alignment) on; ``data`` may not change until the transfer is done.
        """
        lease.writing = self._move("write", data, lease.start + at)
        return lease.writing

    def read(self, lease: Lease, out: torch.Tensor, at: int = 0) -> Transfer:
        """Start copying a lease, from ``at`` on, into a flat tensor of bytes."""
        return self._move("read", out, lease.start + at, lease)

    def _move(self, what: str, data: torch.Tensor, start: int, source: Lease | None = None) -> Transfer:
        """Hand a transfer to its thread, which holds ``source`` until it is over."""
        count, given = data.numel(), [(data, source)]
        ready = self.streams.mark(self.streams.current()) if self.streams is not None else None

        def job() -> None:
            tensor, read_from = given.pop()
            try:
                if read_from is None:
                    self._write(tensor, start, ready)
                    self.counts.written_bytes += count
                    return
                if read_from.writing is not None:
                    read_from.writing.wait()
                self._read(tensor, start, ready)
                self.counts.read_bytes += count
            except StoreError:
                raise
            except BaseException as error:
                raise self._explain(what, error) from error

        return self._lanes[what].do(job)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is under way, end the threads, give the bytes back. It happens by itself with the last
        reference to the tier.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for lane in self._lanes.values():
            lane.close()
        self._drop()

    def __del__(self) -> None:
        if "_lanes" in self.__dict__ and not sys.is_finalizing():  # threads have ended before the interpreter
            self.close()

    # ---- what a tier defines -----------------------------------------------------------------------

    @abstractmethod
    def _grow(self, end: int) -> None:
        """Make the slab reach to ``end``. Transfers may be under way: what lies there stays where it is, so a
        slab in memory grows by pieces.
        """

    @abstractmethod
    def _write(self, data: torch.Tensor, start: int, ready: Event | None) -> None:
        """Copy bytes in, on the writer's thread, after ``ready``."""

    @abstractmethod
    def _read(self, out: torch.Tensor, start: int, ready: Event | None) -> None:
        """Copy bytes out, on the reader's thread, after ``ready``."""

    @abstractmethod
    def _drop(self) -> None:
        """Give the slab back."""

    @abstractmethod
    def _explain(self, what: str, error: BaseException) -> StoreError:
        """The error to raise for a transfer that failed with ``error``: it says what to do."""
