"""Readers of a storage are warned before it is overwritten, swapped or emptied."""

from __future__ import annotations

import weakref

import pytest
import torch
from names_seen import Names

from lowtide import private
from lowtide.writes import WriteWatch, any_watched


@pytest.fixture(autouse=True)
def kernels_of_writes() -> None:
    """An interceptor that starts puts them at their key, for the life of the process."""
    with Names():
        pass


class Reader:
    """Reads one storage later, and notes how it is about to change."""

    def __init__(self, tensor: torch.Tensor, again: bool = False) -> None:
        self.key, self.again = private.storage_key(tensor), again
        self.told: list[str] = []

    def reads(self, key: int) -> bool:
        return key == self.key

    def before_change(self, key: int, how: str) -> bool:
        self.told.append(how)
        return self.again


def watched(reader: Reader) -> WriteWatch:
    watch = WriteWatch()
    watch.add({reader.key: weakref.ref(reader)})
    return watch


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda x: x.add_(1), "written"),
        (lambda x: x.data.mul_(2), "written"),
        (lambda x: x[1:].zero_(), "written"),
        (lambda x: torch.add(x.clone(), 1, out=x), "written"),
        (lambda x: x.set_(torch.ones(4)), "swapped"),
        (lambda x: x.untyped_storage().resize_(0), "emptied"),
    ],
)
def test_a_reader_is_told_how_its_storage_changes(change, how) -> None:
    x = torch.ones(4)
    reader = Reader(x)
    watch = watched(reader)
    x + 1  # reading is no change
    assert reader.told == []
    change(x)
    assert reader.told == [how]
    del watch


def test_a_reader_is_told_once_unless_it_asks_for_more() -> None:
    for again, told in ((False, 1), (True, 3)):
        x = torch.ones(4)
        reader = Reader(x, again)
        watch = watched(reader)
        for _ in range(3):
            x.add_(1)
        assert len(reader.told) == told
        del watch


def test_nothing_is_watched_after_the_last_watch() -> None:
    x = torch.ones(4)
    reader, before = Reader(x), any_watched()  # tests that ran earlier may have left garbage
    watch = watched(reader)
    assert any_watched()
    del watch
    assert any_watched() == before
    x.add_(1)
    assert reader.told == []
