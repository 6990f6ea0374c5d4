"""Main memory: the counting allocator, exact bytes as requested, every thread.

The allocator is the process's, so installing is counted: the last `uninstall` puts PyTorch's own back. What
was allocated in between stays valid, and is still counted when it is freed. Bytes are those requested
(``nbytes``), not what malloc rounds them to. Memory that PyTorch did not ask its current allocator for (NumPy
arrays, shared memory, what `torch.load` or `torch.UntypedStorage(n)` makes) does not count.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowtide.errors import MeterError
from lowtide.native import BuildError, build

from .register import LiveSource, Moments, Peak

_LOCK = threading.RLock()
_SOURCE = Path(__file__).with_name("counting_allocator.cpp")


class CountingAllocator:
    """The compiled allocator's functions. One per process: get it from `counting_allocator`."""

    def __init__(self, path: str) -> None:
        # PyDLL: calls of nanoseconds are not worth giving up the interpreter lock for
        self.calls: Any = ctypes.PyDLL(path)
        for name in ("live", "mark_peak", "mark_live", "log_open", "log_close", "log_read", "now"):
            getattr(self.calls, f"lt_{name}").restype = ctypes.c_int64
        numbers = ctypes.POINTER(ctypes.c_int64)
        self.calls.lt_log_read.argtypes = [ctypes.c_int64, ctypes.c_int64, numbers, numbers]

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

    @property
    def register_addresses(self) -> list[int]:
        """Where C++ finds what opens a register, says its peak and its live bytes, and closes it."""
        calls = (getattr(self.calls, f"lt_mark_{name}") for name in ("open", "peak", "live", "close"))
        return [ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls]


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
        address = ctypes.cast(self._allocator.calls.lt_mark_live, ctypes.c_void_p).value
        assert address is not None
        return address, self._mark

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
