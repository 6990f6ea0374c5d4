"""Slabs: where each buffer of a step lies in one piece of memory, so that no step allocates.

`Arena` hands out places (`Lease`) in any slab: a tier's, which it does not see, or the device's. ZeRO-R's M_D
(arXiv 1910.02054, section 6.3) and OneFlow's static memory reuse: a step stores the same as the one before,
so a layout is made once from the lifetimes. A second forward before the first one's backward finds its places
taken and gets others, above the layout, first fit.

`Slab` is the memory on the device that values come back into. Autograd may hold a value for longer than the
plan knows (a retained graph, a hook, a gradient that is a view of a saved tensor). So each value gets a
storage of its own over its place, and a place is used again only when nothing refers to its last storage and
no transfer is under way there; else the value comes back into memory of its own, and that is counted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from lowtide import accelerator
from lowtide.extensions.moves.store.lanes import Transfer


@dataclass(slots=True, weakref_slot=True, eq=False)
class Lease:
    """Bytes from ``start`` to ``end`` of a slab, taken while this object lives.

    Attributes:
        writing: the transfer that fills them.
    """

    start: int
    end: int
    writing: Transfer | None = field(default=None, repr=False)


class Arena:
    """Hands out leases; keeps no bytes itself.

    Args:
        align: leases begin at multiples of this.

    Attributes:
        static_bytes: what the static layout takes.

    Example:
        >>> arena = Arena(align=4)
        >>> arena.expect(offsets=[0, 0], sizes=[10, 8])
        >>> arena.static_bytes
        12
        >>> arena.take(10, 0)
        Lease(start=0, end=12)
    """

    def __init__(self, align: int = 1) -> None:
        self.align = align
        self.static_bytes = 0
        self._static: list[tuple[int, int]] = []
        self._taken: weakref.WeakSet[Lease] = weakref.WeakSet()

    @property
    def taken_bytes(self) -> int:
        """Bytes of the leases that are taken now."""
        return sum(lease.end - lease.start for lease in self._taken)

    def expect(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Keep these places for what every step takes from now on."""
        self._static = [(at, at + self._whole(bytes_)) for at, bytes_ in zip(offsets, sizes, strict=True)]
        ends = (end for (_, end), bytes_ in zip(self._static, sizes, strict=True) if bytes_)
        self.static_bytes = max(self.static_bytes, max(ends, default=0))

    def at(self, start: int, end: int) -> Lease | None:
        """The lease of these bytes, or ``None`` where some of them are taken."""
        if any(other.start < end and start < other.end for other in self._taken):
            return None
        lease = Lease(start, end)
        self._taken.add(lease)
        return lease

    def take(self, bytes_: int, number: int = -1) -> Lease:
        """A lease of at least ``bytes_``: the ``number``-th of the layout when it is free, else the lowest
        that is free above the layout.
        """
        whole = self._whole(bytes_)
        if 0 <= number < len(self._static):
            start, end = self._static[number]
            if end - start >= whole and (lease := self.at(start, end)) is not None:
                return lease
        start = self.static_bytes
        for other in sorted(self._taken, key=lambda lease: lease.start):
            if other.start - start >= whole:
                break
            start = max(start, other.end)
        lease = Lease(start, start + whole)
        self._taken.add(lease)
        return lease

    def _whole(self, bytes_: int) -> int:
        return -(-max(bytes_, 1) // self.align) * self.align


def offsets_of(sizes: Sequence[int], align: int) -> tuple[list[int], int]:
    """The offsets of parts that lie one behind the other, each a multiple of ``align``, and where the last
    one ends.

    >>> offsets_of([10, 3], 64)
    ([0, 64], 67)
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // align) * align)
        end = starts[-1] + size
    return starts, end


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
        self._streams = accelerator.streams_of(device)
        self._readers: set[Any] = set()

    def read_here(self) -> None:
        """What lies here may be read on this thread's stream from now on."""
        if self._streams is not None:
            with self._lock:
                self._readers.add(self._streams.current())

    def take(self, start: int, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Flat bytes of these sizes for transfers to write to, from ``start`` on, or ``None`` where some are
        in use. Each of the tensors holds the place, until `hand_out` gives it to another one. This thread's
        stream goes on after what other streams may still read there.
        """
        offsets, total = offsets_of(sizes, _PART_ALIGN)
        if start + total > self.memory.numel():
            return None
        with self._lock:
            lease = self._arena.at(start, start + total)
            others = set(self._readers)
        if lease is None:
            return None
        if self._streams is not None:
            current = self._streams.current()
            for reader in others - {current}:
                self._streams.order(current, self._streams.mark(reader))
        found = [self.memory[start + at : start + at + size] for at, size in zip(offsets, sizes, strict=True)]
        for target in found:
            target.lease = lease  # type: ignore[attr-defined]
        return found


def hand_out(target: torch.Tensor) -> torch.Tensor:
    """The bytes that transfers have written, as a tensor whose storage holds the place. A transfer's thread
    may keep ``target`` itself for longer than anybody needs the bytes.
    """
    lease = getattr(target, "lease", None)
    if lease is None:  # memory of its own
        return target
    del target.lease  # pyright: ignore[reportAttributeAccessIssue]
    # DLPack is the one public way to a storage that lies within another and keeps it alive
    tensor = from_dlpack(to_dlpack(target))
    tensor.untyped_storage().lease = lease  # pyright: ignore[reportAttributeAccessIssue]
    return tensor
