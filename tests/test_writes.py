"""The tapes of steps whose forward is over are told before a storage is overwritten, swapped or emptied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from names_seen import Names

from lowtide import private
from lowtide.interception import any_watched
from lowtide.run.record.engine import engine
from lowtide.run.record.tape import Tape


@pytest.fixture(autouse=True)
def kernels_of_writes() -> None:
    """An interceptor that starts puts them at their key, for the life of the process."""
    with Names():
        pass


def watched(tensor: torch.Tensor) -> tuple[Tape, Any]:
    """A tape that is watched, and its value of the tensor, which a replay starts from."""
    tape = Tape()
    value = tape.core.source(tensor)
    node = tape.core.node(None, [value], False)
    tape.core.pin(node, [], None)
    tape.node = node  # type: ignore[attr-defined]
    recorder = engine().Recorder(tape=tape.core, governor=None, pack=None, program=None)
    recorder.in_forward = True
    recorder.in_forward = False
    return tape, value


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1),
        lambda x: x.data.mul_(2),
        lambda x: x[1:].zero_(),
        lambda x: torch.add(x.clone(), 1, out=x),
        lambda x: x.set_(torch.zeros(4)),
    ],
)
def test_a_replay_starts_from_what_was_there(change: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(4)
    tape, value = watched(x)
    x + 1  # reading is no change
    assert value.held.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    change(x)
    assert not torch.equal(x, torch.ones(4))
    held = value.held.untyped_storage()
    assert torch.equal(torch.empty(0).set_(held), torch.ones(4))  # type: ignore[call-overload]
    assert held.data_ptr() != x.untyped_storage().data_ptr()
    del tape


def test_what_is_emptied_leaves_a_fingerprint() -> None:
    x = torch.ones(4)
    tape, value = watched(x)
    x.untyped_storage().resize_(0)
    assert value.emptied is not None
    del tape


def test_nothing_is_watched_after_the_last_tape() -> None:
    x = torch.ones(4)
    before = any_watched()  # tests that ran earlier may have left garbage
    tape, _ = watched(x)
    assert any_watched()
    del tape
    assert any_watched() == before
    x.add_(1)
    assert private.version(x) == 1
