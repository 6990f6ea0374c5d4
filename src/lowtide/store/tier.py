"""What every tier does: take bytes in the background, give them back, count both.

A `Tier` hands out *slots* (regions of one slab) and moves bytes between device tensors and slots.
`Tier.write` and `Tier.read` return a `Transfer` at once; `Transfer.wait` ends when the bytes are there and
raises what went wrong. A failed transfer never looks like a finished one.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lowtide.errors import LowtideError
from lowtide.store.arena import Arena, Region

BUFFER_BYTES = 4 << 20
"""Size of the one buffer that each worker moves bytes through: it does not grow with the model (ZeRO-R's
C_B).
"""

Fault = Callable[[str, int], None]
"""Called before every transfer with ``write`` or ``read`` and its bytes: tests delay and fail transfers with
it.
"""


class StoreError(LowtideError, RuntimeError):
    """Bytes could not be stored or brought back; the message says what to do."""


@dataclass
class Counts:
    """What a tier has moved so far.

    Attributes:
        written_bytes, read_bytes: payload of the transfers that finished.
        writes, reads: how many.
        slab_bytes: size of the slab now.
        most_slab_bytes: the most bytes of the slab that were taken at once.
        allocations: how many times the slab was made or made larger.
    """

    written_bytes: int = 0
    read_bytes: int = 0
    writes: int = 0
    reads: int = 0
    slab_bytes: int = 0
    most_slab_bytes: int = 0
    allocations: int = 0


class Transfer:
    """One copy under way.

    Attributes:
        bytes: its size.
    """

    def __init__(self, bytes_: int) -> None:
        self.bytes = bytes_
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """The worker is through."""
        self._error = error
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when the bytes are there.

        Raises:
            StoreError: they are not.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error


class Slot:
    """Bytes that are taken in a tier until they are released, and what is being written there."""

    __slots__ = ("bytes", "region", "tier", "writing")

    def __init__(self, tier: Tier, region: Region, bytes_: int) -> None:
        self.tier, self.region, self.bytes = tier, region, bytes_
        self.writing: Transfer | None = None

    def release(self) -> None:
        """Give the bytes back, once nothing is being written to them any more."""
        region, self.region = self.region, None
        if region is None:
            return
        if self.writing is not None and not self.writing.done:
            self.tier.after(lambda: self.tier.free(region))
        else:
            self.tier.free(region)

    def __del__(self) -> None:
        self.release()


class Worker:
    """One thread that does jobs in order; it ends with `close` or with the interpreter."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        """Do it after everything before it."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is queued, then end."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


@dataclass
class _State:
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    retiring: bool = False
    returned: deque[Region] = field(default_factory=deque)


class Tier(ABC):
    """A place for bytes outside the device.

    Args:
        align: slots begin at multiples of this.
        fault: see `Fault`.

    Attributes:
        name: ``host`` or ``disk``.
        counts: what was moved.
        align: as given.
    """

    name = ""

    def __init__(self, align: int, fault: Fault | None = None) -> None:
        self.counts = Counts()
        self.align = align
        self.arena = Arena(align)
        self.fault = fault
        self._state = _State()
        self._writer = Worker(f"lowtide-{self.name}-write")
        self._reader = Worker(f"lowtide-{self.name}-read")

    def expect(self, lower: list[int], upper: list[int], size: list[int]) -> None:
        """Lay out statically what each step will take, and make the slab large enough for it at once.

        Raises:
            StoreError: there is no room for it.
        """
        with self._state.lock:
            self._collect()
            self.arena.expect(lower, upper, size)
            self._ensure(self.arena.static_bytes)

    def take(self, bytes_: int, number: int = -1) -> Slot:
        """Bytes of the slab, where the static layout has them for the ``number``-th expected buffer, or
        elsewhere when those are taken.

        Raises:
            StoreError: there is no room.
        """
        with self._state.lock:
            if self._state.closed:
                raise StoreError(
                    f"the {self.name} store is closed: its limit was removed while a step was under way"
                )
            self._collect()
            region = self.arena.take(bytes_, number)
            try:
                self._ensure(region.end)
            except StoreError:
                self.arena.free(region)
                raise
            self.counts.most_slab_bytes = max(self.counts.most_slab_bytes, self.arena.taken_bytes)
        return Slot(self, region, bytes_)

    def free(self, region: Region) -> None:
        """Give a region back. Never waits: the garbage collector may call this in the middle of anything,
        `take` included.
        """
        self._state.returned.append(region)
        if self._state.lock.acquire(blocking=False):
            try:
                self._collect()
                over = self._state.retiring and not self.arena.taken_bytes
            finally:
                self._state.lock.release()
            if over:
                self.close()

    def _collect(self) -> None:
        """Take in what was given back; the lock is held."""
        returned = self._state.returned
        while returned:
            self.arena.free(returned.popleft())

    def retire(self) -> None:
        """Close as soon as nothing is stored any more."""
        with self._state.lock:
            self._state.retiring = True
            self._collect()
            over = not self.arena.taken_bytes
        if over:
            self.close()

    def after(self, job: Callable[[], None]) -> None:
        """Do ``job`` when everything that is being written now has been."""
        self._writer.do(job)

    def _ensure(self, end: int) -> None:
        if end > self.counts.slab_bytes:
            self._grow(end)
            self.counts.slab_bytes = end
            self.counts.allocations += 1

    def write(self, data: torch.Tensor, slot: Slot, at: int = 0) -> Transfer:
        """Start copying a flat tensor of bytes into a slot, from ``at`` (a multiple of the tier's alignment)
        on; ``data`` may not change until the transfer is done."""
        transfer = slot.writing = Transfer(data.numel())
        assert slot.region is not None
        start, ready, given = slot.region.start + at, _mark(data), [data]

        def job() -> None:
            try:
                if self.fault is not None:
                    self.fault("write", slot_bytes)
                ready()
                self._write(given.pop(), start)  # whoever waits may count on its bytes being free then
                self.counts.written_bytes += slot_bytes
                self.counts.writes += 1
                transfer.finish()
            except BaseException as error:
                transfer.finish(self._explain("write", error))

        slot_bytes = data.numel()
        self._writer.do(job)
        return transfer

    def read(self, slot: Slot, out: torch.Tensor, at: int = 0) -> Transfer:
        """Start copying a slot, from ``at`` on, into a flat tensor of bytes."""
        transfer = Transfer(out.numel())
        writing, ready, given, count = slot.writing, _mark(out), [out], out.numel()

        def job() -> None:
            try:
                if writing is not None:
                    writing.wait()
                if self.fault is not None:
                    self.fault("read", count)
                ready()
                assert slot.region is not None
                self._read(slot.region.start + at, given.pop())
                self.counts.read_bytes += count
                self.counts.reads += 1
                transfer.finish()
            except BaseException as error:
                transfer.finish(error if isinstance(error, StoreError) else self._explain("read", error))

        self._reader.do(job)
        return transfer

    def close(self) -> None:
        """Finish what is under way, end the threads, give the bytes back."""
        with self._state.lock:
            if self._state.closed:
                return
            self._state.closed = True
        self._writer.close()
        self._reader.close()
        self._drop()

    def __del__(self) -> None:
        if "_reader" in self.__dict__:
            self.close()

    @abstractmethod
    def _grow(self, end: int) -> None:
        """Make the slab reach to ``end``."""

    @abstractmethod
    def _write(self, data: torch.Tensor, start: int) -> None:
        """Copy bytes in; runs on the writer's thread."""

    @abstractmethod
    def _read(self, start: int, out: torch.Tensor) -> None:
        """Copy bytes out; runs on the reader's thread."""

    @abstractmethod
    def _drop(self) -> None:
        """Give the slab back."""

    @abstractmethod
    def _explain(self, what: str, error: BaseException) -> StoreError:
        """An error that says what to do."""


def _mark(tensor: torch.Tensor) -> Callable[[], None]:
    """What a worker has to do before it touches ``tensor``: on a GPU, wait for what was queued before now."""
    if tensor.device.type == "cpu":
        return lambda: None
    event = torch.get_device_module(tensor.device.type).Event()
    event.record()
    return event.synchronize
