"""What counts bytes over a block of code, whatever the device (`Peak`), and main memory's: the counting
allocator, exact bytes as requested, every thread.

The allocator is the process's, so installing is counted: the last `uninstall` puts PyTorch's own back. What
was allocated in between stays valid, and is still counted when it is freed. Bytes are those requested
(``nbytes``), not what malloc rounds them to. Memory that PyTorch did not ask its current allocator for (NumPy
arrays, shared memory, what `torch.load` or `torch.UntypedStorage(n)` makes) does not count.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal

import torch

from lowtide.errors import MeterError
from lowtide.native import BuildError, build

_LOCK = threading.RLock()
_SOURCE = Path(__file__).with_name("counting_allocator.cpp")


class CountingAllocator:
    """The compiled allocator's functions. One per process: get it from `counting_allocator`.

    Attributes:
        calls: the functions.
        register_addresses: where C++ finds what opens a register, says its peak and its live bytes, and
            closes it.
    """

    def __init__(self, path: str) -> None:
        # PyDLL: calls of nanoseconds are not worth giving up the interpreter lock for
        self.calls: Any = ctypes.PyDLL(path)
        for name in ("live", "mark_peak", "mark_live", "log_open", "log_close", "log_read", "now"):
            getattr(self.calls, f"lt_{name}").restype = ctypes.c_int64
        numbers = ctypes.POINTER(ctypes.c_int64)
        self.calls.lt_log_read.argtypes = [ctypes.c_int64, ctypes.c_int64, numbers, numbers]
        of_registers = [getattr(self.calls, f"lt_mark_{name}") for name in ("open", "peak", "live", "close")]
        self.register_addresses = [ctypes.cast(call, ctypes.c_void_p).value or 0 for call in of_registers]

    def install(self) -> None:
        """Count allocations from now on, or join whoever installed before.

        Raises:
            MeterError: when another allocator than PyTorch's default is set.
        """
        code = self.calls.lt_install()
        if code:
            why = "is not PyTorch's default one" if code == 1 else "has a higher priority"
            raise MeterError(
                f"the counting allocator cannot be installed: the CPU allocator of this process {why}"
            )

    def uninstall(self) -> None:
        """Leave; the last to leave puts the default allocator back. A call without an `install` raises
        MeterError.
        """
        if self.calls.lt_uninstall() < 0:
            raise MeterError("the counting allocator is not installed")

    @property
    def installs(self) -> int:
        """How many users it has now; 0 when PyTorch's own allocator is set."""
        return self.calls.lt_installs()

    @property
    def live_bytes(self) -> int:
        """Bytes live now, of those allocated while it was installed."""
        return self.calls.lt_live()


@lru_cache(maxsize=1)
def _load() -> CountingAllocator | MeterError:
    try:
        allocator = CountingAllocator(str(build(_SOURCE, "c10")))
        allocator.install()
        allocator.uninstall()
    except MeterError as error:
        return error
    except BuildError as error:
        return MeterError(f"there is no counting allocator, which measures exactly and cheaply: {error}")
    except (OSError, AttributeError) as error:
        return MeterError(f"the counting allocator cannot be loaded: {error}")
    return allocator


def counting_allocator() -> CountingAllocator:
    """The process's counting allocator, compiled at the first call on this machine (two seconds).

    Raises:
        MeterError: where it cannot be had; `available` tells without raising.
    """
    with _LOCK:
        found = _load()
    if isinstance(found, MeterError):
        raise MeterError(*found.args)
    return found


def available() -> bool:
    """Whether the counting allocator works here: it needs a C++ compiler."""
    with _LOCK:
        return isinstance(_load(), CountingAllocator)


# ---- peaks ---------------------------------------------------------------------------------------

Source = Literal["allocator", "profiler", "cuda"]
LiveSource = Callable[[], int] | tuple[int, int] | tuple[torch.device, int]
"""How C++ reads the bytes that are live, above those at the start: by a Python function that says so; by a C
function, as its address and its only argument; or from a device's allocator, as the device and the requested
bytes that were live at the start."""

Moments = tuple[tuple[float, int], ...]
"""(seconds since the start, bytes live on top of the start) after every allocation and free, in order."""


class Peak:
    """Most bytes live during a block of code, above those live when it was entered; made by
    `lowtide.meter.peak`. Process-wide: every thread counts.

    Reading costs about a microsecond. Blocks may nest and overlap, each sees its own peak. After the block
    the values no longer change.

    Args:
        device: whose memory.
        with_timeline: whether to log every allocation and free.

    Attributes:
        source: what is read: the counting ``allocator`` or the ``profiler`` of main memory, or the statistics
            of CUDA's allocator, ``cuda``.
        timeline: what was logged, after the block.
    """

    source: ClassVar[Source]

    def __init__(self, device: torch.device, with_timeline: bool = False) -> None:
        self.device, self.with_timeline = device, with_timeline
        self.timeline: Moments = ()
        self._is_open = False
        self._kept: tuple[int, int] | None = None

    def __enter__(self) -> Peak:
        if self._is_open or self._kept is not None:
            raise MeterError("a peak() measures one block: make another one for the next")
        self._open()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept, self.timeline = self._close()

    @property
    def allocated_bytes(self) -> int | None:
        """On CUDA most bytes of the allocator's blocks so far, above those at entry, else None: what was
        requested is rounded up to whole blocks.
        """
        return None

    @property
    def reserved_bytes(self) -> int | None:
        """On CUDA the most that the allocator held of the device so far, fragments included, else None."""
        return None

    @property
    def peak_bytes(self) -> int:
        """Most bytes live so far, above those at entry."""
        return self._read()[0] if self._is_open and self._kept is None else self._now()[0]

    @property
    def live_bytes(self) -> int:
        """Bytes live now, above those at entry; negative when older ones were freed."""
        return self._now()[1]

    def live_source(self) -> LiveSource:
        """Where C++ reads `live_bytes` within the block."""
        return lambda: self.live_bytes

    def _now(self) -> tuple[int, int]:
        if self._kept is not None:
            return self._kept
        if not self._is_open:
            raise MeterError(
                "peak() counts from where its with-block is entered: write `with lowtide.meter.peak() as p: "
                "...`"
            )
        return self._read()

    def _open(self) -> None:
        """Begin to count."""
        raise NotImplementedError

    def _read(self) -> tuple[int, int]:
        """Most bytes live so far, and those live now."""
        raise NotImplementedError

    def _close(self) -> tuple[tuple[int, int], Moments]:
        """Count no longer; what `_read` says at the end, and what was logged."""
        raise NotImplementedError


class AllocatorPeak(Peak):
    """A watermark register of the counting allocator."""

    source = "allocator"

    def _open(self) -> None:
        self._allocator = counting_allocator()
        calls = self._allocator.calls
        self._allocator.install()
        self._mark = calls.lt_mark_open()
        if self._mark < 0:
            self._allocator.uninstall()
            raise MeterError("64 peaks are being measured at once, which is all the meter has registers for")
        if self.with_timeline:
            self._first, self._clock = calls.lt_log_open(), calls.lt_now()

    def _read(self) -> tuple[int, int]:
        calls = self._allocator.calls
        return calls.lt_mark_peak(self._mark), calls.lt_mark_live(self._mark)

    def live_source(self) -> LiveSource:
        calls = self._allocator.calls
        address = ctypes.cast(calls.lt_live, ctypes.c_void_p).value or 0
        return address, calls.lt_live() - calls.lt_mark_live(self._mark)

    def _close(self) -> tuple[tuple[int, int], Moments]:
        bytes_ = self._read()
        self._allocator.calls.lt_mark_close(self._mark)
        moments = self._moments(bytes_[1]) if self.with_timeline else ()
        self._allocator.uninstall()
        return bytes_, moments

    def _moments(self, end_bytes: int) -> Moments:
        """The newest 1,048,576 events of the log, in the order of their clock."""
        calls = self._allocator.calls
        last = calls.lt_log_close()
        room = max(0, min(last - self._first, 1 << 20))
        clock, deltas = (ctypes.c_int64 * room)(), (ctypes.c_int64 * room)()
        count = calls.lt_log_read(max(self._first, last - room), last, clock, deltas)
        # 0 but for a log that overflowed, whose oldest events are gone
        live = end_bytes - sum(deltas[:count])
        moments = []
        for at, delta in zip(clock[:count], deltas[:count], strict=True):
            live += delta
            moments.append(((at - self._clock) * 1e-9, live))
        return tuple(moments)
