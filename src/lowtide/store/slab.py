"""The slab on the device into which values come back, and when a place in it may be used again.

Autograd may hold what it was handed for longer than the plan knows (a retained graph, a hook, a gradient that
is a view of a saved tensor). So each value gets a storage of its own over its place, and a place is used
again only when nothing refers to its last storage and no transfer is under way there; else the value comes
back into memory of its own, and that is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from lowtide.store.arena import Arena, packed

_PART_ALIGN = 64
"""Parts of an encoded form begin at multiples of this."""


class Slab:
    """Memory on the device, in places that the plan lays out.

    Args:
        device: where.
        bytes_: how much.

    Attributes:
        memory: all of it.

    Example:
        >>> slab = Slab(torch.device("cpu"), 1024)
        >>> (first,) = slab.take(0, [100])
        >>> slab.take(64, [100]) is None  # in use
        True
        >>> del first
        >>> slab.take(64, [100]) is None
        False
    """

    def __init__(self, device: torch.device, bytes_: int) -> None:
        self.memory = torch.empty(bytes_, dtype=torch.uint8, device=device)
        self._arena = Arena()
        self._lock = threading.Lock()

    def take(self, start: int, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Flat bytes of these sizes for transfers to write to, from ``start`` on, or ``None`` where some are
        in use. Each of the tensors holds the place, until `handed_out` gives it to another one.
        """
        offsets, total = packed(sizes, _PART_ALIGN)
        if start + total > self.memory.numel():
            return None
        with self._lock:
            region = self._arena.at(start, start + total)
        if region is None:
            return None
        found = [self.memory[start + at : start + at + size] for at, size in zip(offsets, sizes, strict=True)]
        for target in found:
            target.region = region  # type: ignore[attr-defined]
        return found


def handed_out(target: torch.Tensor) -> torch.Tensor:
    """The bytes that transfers have written, as a tensor whose storage holds the place. A transfer's thread
    may keep ``target`` itself for longer than anybody needs the bytes.
    """
    region = getattr(target, "region", None)
    if region is None:  # memory of its own
        return target
    del target.region  # pyright: ignore[reportAttributeAccessIssue]
    # DLPack is the one public way to a storage that lies within another and keeps it alive
    tensor = from_dlpack(to_dlpack(target))
    tensor.untyped_storage().region = region  # pyright: ignore[reportAttributeAccessIssue]
    return tensor
