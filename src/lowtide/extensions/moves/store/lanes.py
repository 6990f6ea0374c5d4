"""Transfers in the background: a lane for each direction, on a thread or on a stream of the device.

A lane does what it is given in order. `ThreadLane` is a thread: copies within main memory, files.
`StreamLane` is a stream: copies between an accelerator and page-locked memory. Both return a `Transfer` at
once. The stores and the host optimizer move all their bytes this way.

`lowtide.accelerator.Streams` is all that this needs of an accelerator; tests replace it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Event, Tensor

from lowtide.accelerator import Streams

Pairs = Iterable[tuple[Tensor, Tensor]]
"""(target, source) of each copy."""


class Transfer:
    """A copy, or other work, under way.

    There are two ways to wait. `wait` holds the program: after it the host may read what was written. `join`
    holds the device: what is queued on it from then on comes after the transfer.

    Attributes:
        error: what went wrong, once it is over.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the transfer finished."""
        self.error = error
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when it is over; raises what went wrong."""
        self._done.wait()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """Order the device's work behind it; on a thread's transfer that is `wait`."""
        self.wait()


def no_transfer() -> Transfer:
    """A transfer that is over."""
    transfer = Transfer()
    transfer.finish()
    return transfer


class ThreadLane:
    """One thread that does jobs in order, made for the first; it ends with `close`, with the lane, or with
    the interpreter.

    >>> lane, seen = ThreadLane("example"), []
    >>> lane.do(lambda: seen.append(1)).wait()
    >>> seen
    [1]
    """

    def __init__(self, name: str) -> None:
        self._own: set[int] = set()
        own = self._own  # a lane that its thread held would never go
        self._executor = ThreadPoolExecutor(1, f"lowtide-{name}", lambda: own.add(threading.get_ident()))

    def do(self, work: Callable[[], object]) -> Transfer:
        """Queue ``work`` behind all earlier work. Waiting for the transfer raises what ``work`` raises."""
        transfer = Transfer()
        given = [work]  # released before `finish`: its bytes are free by then

        def job() -> None:
            try:
                given.pop()()
            except BaseException as error:
                transfer.finish(error)
            else:
                transfer.finish()

        self._executor.submit(job)
        return transfer

    def close(self) -> None:
        """Finish the queued work, then end the thread."""
        self._executor.shutdown(wait=threading.get_ident() not in self._own)


class StreamLane:
    """Copies on a stream of their own.

    Args:
        streams: of the device.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.stream = streams.new()

    def copy(self, pairs: Pairs, holds: object, after: Sequence[Event] = ()) -> Queued:
        """Start copying.

        Args:
            pairs: targets and sources.
            holds: what may not be freed before the copy has run: the tensors on the device.
            after: what the copy waits for; without it, what is queued on the computing stream now.
        """
        origin = self.streams.current()
        for event in after or (self.streams.mark(origin),):
            self.streams.order(self.stream, event)
        for target, source in pairs:
            self.streams.copy(self.stream, target, source)
        return Queued(self, origin, holds)

    def close(self) -> None:
        """Finish what is queued."""
        self.streams.mark(self.stream).synchronize()


class Queued(Transfer):
    """A copy on a stream.

    It holds the device's tensor until it is waited for. If it never is, the stream that the tensor came from
    waits before its memory is used again. (`torch.Tensor.record_stream` would have the allocator look
    for finished copies instead, so that memory grew with how far the program runs ahead of the device.)

    Attributes:
        event: after the copy.
    """

    def __init__(self, lane: StreamLane, origin: Any, holds: object) -> None:
        self._streams, self._origin = lane.streams, origin
        self.event = lane.streams.mark(lane.stream)
        self._holds: list[object] = [holds]

    @property
    def done(self) -> bool:
        """Whether the copy has run."""
        return self.event.query()

    def wait(self) -> None:
        """Return when the copy has run."""
        self.event.synchronize()
        self._holds.clear()

    def join(self) -> None:
        """Let the computing stream go on only after the copy."""
        current = self._streams.current()
        self._streams.order(current, self.event)
        if current == self._origin:
            self._holds.clear()
        self._release()

    def _release(self) -> None:
        if self._holds:
            self._streams.order(self._origin, self.event)
            self._holds.clear()

    def __del__(self) -> None:
        if "_holds" in self.__dict__:
            self._release()
