"""The counting allocator for main memory: exact bytes as requested, every thread.

The allocator is the process's, so installing is counted: the last `uninstall` puts PyTorch's own back. What
was allocated in between stays valid, and is still counted when it is freed. Bytes are those requested
(``nbytes``), not what malloc rounds them to. Memory that PyTorch did not ask its current allocator for (NumPy
arrays, shared memory, what `torch.load` or `torch.UntypedStorage(n)` makes) does not count.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowtide.errors import MeterError
from lowtide.native import BuildError, built

from .register import Moments, Peak

_LOCK = threading.RLock()
_SOURCE = Path(__file__).with_name("counting_allocator.cpp")


class CountingAllocator:
    """The compiled allocator's functions. One per process: get it from `counting_allocator`."""

    def __init__(self, path: str) -> None:
        # PyDLL: calls of nanoseconds are not worth giving up the interpreter lock for
        calls = ctypes.PyDLL(path)
        number, position, pointer = ctypes.c_int64, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)

        def bind(name: str, result: Any, *arguments: Any) -> Any:
            function = getattr(calls, name)
            function.restype, function.argtypes = result, list(arguments)
            return function

        self._install, self._uninstall, self._installs = (
            bind(f"lt_{name}", position) for name in ("install", "uninstall", "installs")
        )
        self._live = bind("lt_live", number)
        self.mark_open, self.mark_close = (
            bind("lt_mark_open", position),
            bind("lt_mark_close", None, position),
        )
        self.mark_peak, self.mark_live = (
            bind(f"lt_mark_{name}", number, position) for name in ("peak", "live")
        )
        self.log_open, self.log_end, self.now = (
            bind(f"lt_{name}", number) for name in ("log_open", "log_end", "now")
        )
        self.log_close = bind("lt_log_close", None)
        self.log_read = bind("lt_log_read", number, number, number, pointer, pointer)

    def install(self) -> None:
        """Count allocations from now on, or join whoever installed before.

        Raises:
            MeterError: when another allocator than PyTorch's default is set.
        """
        code = self._install()
        if code:
            why = "is not PyTorch's default one" if code == 1 else "has a higher priority"
            raise MeterError(
                f"the counting allocator cannot be installed: the CPU allocator of this process {why}"
            )

    def uninstall(self) -> None:
        """Leave; the last to leave puts the default allocator back. A call without an `install` raises
        MeterError.
        """
        if self._uninstall() < 0:
            raise MeterError("the counting allocator is not installed")

    @property
    def installs(self) -> int:
        """How many users it has now; 0 when PyTorch's own allocator is set."""
        return self._installs()

    @property
    def live_bytes(self) -> int:
        """Bytes live now, of those allocated while it was installed."""
        return self._live()


@lru_cache(maxsize=1)
def _load() -> CountingAllocator | MeterError:
    try:
        allocator = CountingAllocator(str(built(_SOURCE, "c10")))
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
        a = self._allocator = counting_allocator()
        with ExitStack() as undo:
            a.install()
            undo.callback(a.uninstall)
            self._mark = a.mark_open()
            if self._mark < 0:
                raise MeterError(
                    "64 peaks are being measured at once, which is all the meter has registers for"
                )
            undo.callback(a.mark_close, self._mark)
            if self.with_timeline:
                self._first, self._clock = a.log_open(), a.now()
                if self._first < 0:
                    raise MeterError("no memory for the event log")
            undo.pop_all()

    def _read(self) -> tuple[int, int]:
        return self._allocator.mark_peak(self._mark), self._allocator.mark_live(self._mark)

    def _close(self) -> tuple[tuple[int, int], Moments]:
        a, bytes_ = self._allocator, self._read()
        a.mark_close(self._mark)
        moments: Moments = ()
        if self.with_timeline:
            last = a.log_end()
            a.log_close()
            moments = self._moments(last, bytes_[1])
        a.uninstall()
        return bytes_, moments

    def _moments(self, last: int, end_bytes: int) -> Moments:
        """The newest 1,048,576 events of the log, in the order of their clock."""
        room = max(0, min(last - self._first, 1 << 20))
        clock, deltas = (ctypes.c_int64 * room)(), (ctypes.c_int64 * room)()
        count = self._allocator.log_read(max(self._first, last - room), last, clock, deltas)
        # 0 but for a log that overflowed, whose oldest events are gone
        live = end_bytes - sum(deltas[:count])
        moments = []
        for at, delta in zip(clock[:count], deltas[:count], strict=True):
            live += delta
            moments.append(((at - self._clock) * 1e-9, live))
        return tuple(moments)
