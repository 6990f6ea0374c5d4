"""The slab on the device into which values come back, and when a place in it may be used again.

Autograd may hold what it was handed for longer than the plan knows (a retained graph, a hook, a gradient that is a view of a saved tensor). So each
value gets a storage of its own over its place, and a place is used again only when nothing refers to the storage before and no transfer is
under way there; else the value comes back into memory of its own, and that is counted.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from lowtide.store.tier import Transfer


class Place:
    """Bytes of the slab in use.

    Args:
        memory: the slab's.
        start, bytes_: which of it.
        tensor: on the storage that is handed out.

    Attributes:
        start, end: as given.
        target: the same bytes as part of the slab, for transfers, whose threads let go of what they wrote when they get to it.
    """

    __slots__ = ("_pending", "_storage", "end", "start", "target")

    def __init__(self, memory: torch.Tensor, start: int, bytes_: int, tensor: torch.Tensor) -> None:
        self.start, self.end = start, start + bytes_
        self.target = memory[start : start + bytes_]
        self._pending: list[Any] = []
        self._storage = weakref.ref(tensor.untyped_storage())

    def writing(self, work: list[Any]) -> None:
        """These transfers or collectives write there; nothing does when there are none.

        A transfer is held by its worker until it is done, and if it fails its error holds much; a collective is held by nobody else.
        """
        self._pending = [weakref.ref(item) if isinstance(item, Transfer) else item for item in work]

    @property
    def free(self) -> bool:
        """Whether nobody refers to the bytes, and nothing is being written there."""
        return self._storage() is None and all(_done(work) for work in self._pending)


def _done(work: Any) -> bool:
    if isinstance(work, weakref.ref):
        transfer = work()
        return transfer is None or transfer.done
    return work.is_completed()


class Slab:
    """Memory on the device, in places that the plan lays out.

    Args:
        device: where.
        bytes_: how much.

    Attributes:
        memory: all of it.
        placed: how often a place was taken.

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
        self.placed = 0
        self._taken: list[Place] = []
        self._lock = threading.Lock()

    def take(self, start: int, bytes_: int) -> tuple[Place, torch.Tensor] | None:
        """The bytes from ``start`` on as a flat tensor of bytes with a storage of its own, or ``None`` where some of them are in use."""
        end = start + bytes_
        with self._lock:
            self._taken = [place for place in self._taken if not place.free]
            if end > self.memory.numel() or any(place.start < end and start < place.end for place in self._taken):
                return None
            # the one public way to a storage that begins within another one and keeps it alive
            tensor = from_dlpack(to_dlpack(self.memory[start:end]))
            place = Place(self.memory, start, bytes_, tensor)
            self._taken.append(place)
            self.placed += 1
        return place, tensor
