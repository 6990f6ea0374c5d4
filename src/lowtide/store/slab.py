"""The slab on the device into which values come back, and when a place in it may be used again.

Autograd may hold what it was handed for longer than the plan knows (a retained graph, a hook, a gradient that
is a view of a saved tensor). So each value gets a storage of its own over its place, and a place is used
again only when nothing refers to its last storage and no transfer is under way there; else the value comes
back into memory of its own, and that is counted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from lowtide.store.lanes import Transfer


class Place:
    """Bytes of the slab in use.

    Args:
        memory: the slab's.
        start, bytes_: which of it.
        tensor: on the storage that is handed out.

    Attributes:
        start, end: as given.
    """

    __slots__ = ("_memory", "_pending", "_storage", "end", "start")

    def __init__(self, memory: torch.Tensor, start: int, bytes_: int, tensor: torch.Tensor) -> None:
        self.start, self.end = start, start + bytes_
        self._memory = memory
        self._pending: list[Any] = []
        self._storage = weakref.ref(tensor.untyped_storage())

    @property
    def target(self) -> torch.Tensor:
        """The same bytes as part of the slab, for transfers: their threads release what they wrote at some
        later time.
        """
        return self._memory[self.start : self.end]

    def writing(self, work: Sequence[Any]) -> None:
        """These transfers or collectives write there; nothing does when there are none.

        A transfer is held by its worker until it is done, and if it fails its error holds much; a collective
        is held only here.
        """
        self._pending = [weakref.ref(item) if isinstance(item, Transfer) else item for item in work]

    @property
    def free(self) -> bool:
        """Whether nothing refers to the bytes or writes there."""
        return self._storage() is None and all(_done(work) for work in self._pending)


def _done(work: Any) -> bool:
    found = work() if isinstance(work, weakref.ref) else work
    return found is None or found.done


class Slab:
    """Memory on the device, in places that the plan lays out.

    Args:
        device: where.
        bytes_: how much.

    Attributes:
        memory: all of it.

    Example:
        >>> slab = Slab(torch.device("cpu"), 1024)
        >>> place, first = slab.take(0, 100)
        >>> slab.take(64, 100) is None  # in use
        True
        >>> del first
        >>> slab.take(64, 100) is None
        False
    """

    def __init__(self, device: torch.device, bytes_: int) -> None:
        self.memory = torch.empty(bytes_, dtype=torch.uint8, device=device)
        self._taken: list[Place] = []
        self._lock = threading.Lock()

    def take(self, start: int, bytes_: int) -> tuple[Place, torch.Tensor] | None:
        """The bytes from ``start`` on as a flat tensor of bytes with a storage of its own, or ``None`` where
        some of them are in use.
        """
        end = start + bytes_
        if end > self.memory.numel():
            return None
        with self._lock:
            beside = [place for place in self._taken if place.start < end and start < place.end]
            if not all(place.free for place in beside):
                return None
            # DLPack is the one public way to a storage that lies within another and keeps it alive
            tensor = from_dlpack(to_dlpack(self.memory[start:end]))
            place = Place(self.memory, start, bytes_, tensor)
            self._taken = [other for other in self._taken if other not in beside] + [place]
        return place, tensor
