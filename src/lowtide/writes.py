"""Warn the readers of a storage before it is overwritten, swapped or emptied.

Between forward and backward, and in backward, any code may write to a tensor that a replay starts from: in
place, or through ``.data``, where no version counter moves. A dispatch key of our own is let in there. Only
operations that write have a kernel at it, so all others cost nothing.

A reader has two methods. ``reads(key)`` says whether it holds the storage with that key
(`lowtide.private.storage_key`), and reads it later. ``before_change(key, how)`` is called with how the
storage is about to change: it is ``written``, ``swapped`` for another one in its tensor, or ``emptied`` by a
resize. It returns whether it is to be called before the next change, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from lowtide import private

KEY = "TESTING_ONLY_GenericMode"
"""The key at which operations that write have a kernel, above autograd; nothing else uses it."""
PARSED = private.dispatch_key(KEY)


class WriteWatch:
    """The storages that the replays of one forward start from; while it lives, their readers are warned."""

    __slots__ = ("__weakref__", "tables")

    def __init__(self) -> None:
        self.tables: list[dict[int, weakref.ref[Any]]] = []

    def add(self, readers: dict[int, weakref.ref[Any]]) -> None:
        """Warn each reader, once unless it asks for more, before the storage with its key changes.

        From here on writes of this thread are seen, and those of backwards that it begins.
        """
        table: dict[int, weakref.ref[Any]] = {}
        for key, reference in readers.items():
            reader = reference()
            if reader is not None and reader.reads(key):
                table[key] = reference
        if table:
            watched = _watched()
            if not self.tables:
                weakref.finalize(self, _end, self.tables).atexit = False
                watched.watches.add(self)
            self.tables.append(table)
            if watched.native is not None:
                watched.native.watch(list(table))
            private.include_key(PARSED, True)


def _end(tables: list[dict[int, weakref.ref[Any]]]) -> None:
    """Warn nobody any more of the storages in a watch's tables: the watch is gone."""
    watched = _watched()
    if watched.native is not None:
        for table in tables:
            watched.native.unwatch(list(table))
    drop_idle_key()


class _Watched:
    """All watches of the process.

    Attributes:
        watches: those that live.
        native: the compiled kernel, which knows the watched keys, or ``None``.
    """

    def __init__(self) -> None:
        self.watches: weakref.WeakSet[WriteWatch] = weakref.WeakSet()
        self.native: Any = None
        private.before_storage_resizes(_resizes)


_watched = cache(_Watched)


def serve(native: Any) -> None:
    """The compiled kernel, which asks for the watched storages; or ``None``, where Python's kernels do."""
    _watched().native = native
    if native is not None:
        native.before_write(before_write)


def any_watched() -> bool:
    """Whether any storage is watched."""
    return len(_watched().watches) > 0


def drop_idle_key() -> None:
    """Take the key out of this thread where no storage is watched."""
    if not any_watched():
        private.include_key(PARSED, False)


def before_write(written: Iterable[torch.Tensor], name: str) -> None:
    """The operation ``name`` is about to write to these tensors."""
    how = "swapped" if name.startswith("aten::set_") else "written"
    for tensor in written:
        _warn(private.storage_key(tensor), how)


def _resizes(storage: torch.UntypedStorage, nbytes: int) -> None:
    if nbytes < storage.nbytes():
        _warn(private.storage_address(storage), "emptied")


def _warn(key: int, how: str) -> None:
    """Warn each reader of the storage with that key."""
    watched = _watched()
    for table in [table for watch in watched.watches for table in watch.tables]:
        reference = table.get(key)
        if reference is None:
            continue
        reader = reference()
        if reader is not None and reader.before_change(key, how):
            continue
        del table[key]
        if watched.native is not None:
            watched.native.unwatch([key])
