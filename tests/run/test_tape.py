"""Values of a running step on an accelerator's streams, played here by what they would be asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.run.record import tape
from lowtide.run.record.tape import LiveValue


class Stream:
    """Notes which other stream it waits for."""

    def __init__(self, name: str, log: list[tuple[str, str, str]]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))


class Copy:
    """A replayed copy on the device.

    Args:
        leased: whether it lies in a slab, which the allocator does not know.
    """

    device = torch.device("cuda:0")

    def __init__(self, log: list[tuple[str, str, str]], leased: bool = False) -> None:
        self.log = log
        self.storage = SimpleNamespace(lease=None) if leased else SimpleNamespace()

    def record_stream(self, stream: Stream) -> None:
        self.log.append(("the allocator", "waits for", stream.name))

    def untyped_storage(self) -> Any:
        return self.storage


def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, Stream, list[Any]]:
    """Two streams, of which the first is current, and what they are asked for."""
    log: list[Any] = []
    one, other = Stream("one", log), Stream("other", log)
    monkeypatch.setattr(tape, "current_stream", lambda device: now[0])
    now = [one]
    log.append(now)
    return one, other, log


def test_a_cached_copy_is_read_behind_the_stream_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, log = streams(monkeypatch)
    now = log.pop()
    value, copy = LiveValue(None, 16), Copy(log)
    value.keep_cached(copy)  # type: ignore[arg-type]
    assert value.here() is copy and log == []
    now[0] = other
    assert value.here() is copy
    assert log == [("other", "waits for", "one"), ("the allocator", "waits for", "other")]
    assert value.here() is copy and len(log) == 2  # it has waited
    now[0] = one  # what it writes there comes behind the reader
    assert value.here() is copy
    assert log[2:] == [("one", "waits for", "other"), ("the allocator", "waits for", "one")]


def test_a_place_in_a_slab_goes_to_no_other_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """`record_stream` does nothing for it: the other stream gets a copy, and its place waits for that."""
    _, other, log = streams(monkeypatch)
    now = log.pop()
    monkeypatch.setattr(tape, "on_a_copy", lambda tensor: "a copy of its own")
    value = LiveValue(None, 16)
    value.keep_cached(Copy(log, leased=True))  # type: ignore[arg-type]
    now[0] = other
    assert value.here() == "a copy of its own"
    assert log == [("other", "waits for", "one"), ("one", "waits for", "other")]
