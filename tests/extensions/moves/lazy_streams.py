"""A stand-in for an accelerator's streams: nothing runs before somebody waits, and then as late as is
allowed.

Whatever is not ordered by an event therefore comes out in the wrong order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from lowtide.extensions.moves.store.lanes import Streams
from lowtide.extensions.moves.store.tier import Tier

T = TypeVar("T", bound=Tier)


class Stream:
    """What was asked of it, and how much of that has run."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []
        self.at = 0

    def advance(self, end: int) -> None:
        """Run up to a mark."""
        while self.at < end:
            self.at += 1
            self.jobs[self.at - 1]()


class Event:
    """A mark in a stream."""

    def __init__(self, streams: LazyStreams, stream: Stream) -> None:
        self.streams, self.stream, self.end = streams, stream, len(stream.jobs)

    def query(self) -> bool:
        with self.streams.lock:
            return self.stream.at >= self.end

    def synchronize(self) -> None:
        with self.streams.lock:
            self.streams.waits += 1
            self.stream.advance(self.end)


class LazyStreams(Streams):
    """The stand-in.

    Args:
        eager: what computes does so at once, as PyTorch does on a CPU: whole models can run beside it.

    Attributes:
        waits: how often the program waited for an event.
        made: every stream but the computing one.
        running: the computing stream.
    """

    def __init__(self, eager: bool = False) -> None:
        self.eager = eager
        self.device = torch.device("cpu")
        self.lock = threading.RLock()
        self.running = Stream()
        self.made: list[Stream] = []
        self.waits = 0

    def new(self) -> Stream:
        self.made.append(Stream())
        return self.made[-1]

    def current(self) -> Stream:
        return self.running

    def mark(self, stream: Stream) -> Event:
        with self.lock:
            return Event(self, stream)

    def order(self, stream: Stream, event: Any) -> None:
        with self.lock:
            stream.jobs.append(lambda: event.stream.advance(event.end))
            if self.eager and stream is self.running:
                stream.advance(len(stream.jobs))

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        # a real stream's copy knows addresses and keeps nothing alive
        target, source = _unowned(target), _unowned(source)
        with self.lock:
            stream.jobs.append(lambda: target.copy_(source))

    def compute(self, work: Callable[[], object]) -> None:
        """Ask the computing stream for something."""
        with self.lock:
            self.running.jobs.append(work)

    def synchronize(self) -> None:
        with self.lock:
            for stream in (*self.made, self.running):
                stream.advance(len(stream.jobs))


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes, kept alive by nobody: tests hold the memory itself."""
    import ctypes

    kind = ctypes.c_uint8 * tensor.nbytes
    return torch.frombuffer(kind.from_address(tensor.data_ptr()), dtype=torch.uint8).view(tensor.dtype)


def on_streams(kind: type[T], streams: Streams, *arguments: Any) -> T:
    """A tier on these streams."""
    with patch("lowtide.extensions.moves.store.tier.streams_of", lambda _: streams):
        return kind(*arguments)
