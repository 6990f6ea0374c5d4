"""Offsets within one slab, so that no step allocates: a static layout for what is expected, first fit above
it for what is not.

ZeRO-R's M_D (arXiv 1910.02054, section 6.3) and OneFlow's static memory reuse: a step stores the same as
the one before, so a layout is made once from the lifetimes. A second forward before
the first one's backward finds its places taken and gets others, which are reused by size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from lowtide.store.lanes import Transfer


@dataclass(slots=True, weakref_slot=True, eq=False)
class Region:
    """Bytes from ``start`` to ``end`` of a slab, taken while this object lives.

    Attributes:
        writing: the transfer that fills them.
    """

    start: int
    end: int
    writing: Transfer | None = field(default=None, repr=False)


class Arena:
    """Hands out regions; keeps no bytes itself.

    Args:
        align: regions begin at multiples of this.

    Attributes:
        static_bytes: what the static layout takes.

    Example:
        >>> arena = Arena(align=4)
        >>> arena.expect(offsets=[0, 0], sizes=[10, 8])
        >>> arena.static_bytes
        12
        >>> arena.take(10, 0)
        Region(start=0, end=12)
    """

    def __init__(self, align: int = 1) -> None:
        self.align = align
        self.static_bytes = 0
        self._static: list[tuple[int, int]] = []
        self._taken: weakref.WeakSet[Region] = weakref.WeakSet()

    @property
    def taken_bytes(self) -> int:
        """Bytes of the regions that are taken now."""
        return sum(region.end - region.start for region in self._taken)

    def expect(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Keep these places for what every step takes from now on."""
        self._static = [(at, at + self._whole(bytes_)) for at, bytes_ in zip(offsets, sizes, strict=True)]
        ends = (end for (_, end), bytes_ in zip(self._static, sizes, strict=True) if bytes_)
        self.static_bytes = max(self.static_bytes, max(ends, default=0))

    def at(self, start: int, end: int) -> Region | None:
        """The region of these bytes, or ``None`` where some of them are taken."""
        if any(other.start < end and start < other.end for other in self._taken):
            return None
        region = Region(start, end)
        self._taken.add(region)
        return region

    def take(self, bytes_: int, number: int = -1) -> Region:
        """A region of at least ``bytes_``: the ``number``-th of the layout when it is free, else the lowest
        that is free above the layout.
        """
        whole = self._whole(bytes_)
        if 0 <= number < len(self._static):
            start, end = self._static[number]
            if end - start >= whole and (region := self.at(start, end)) is not None:
                return region
        start = self.static_bytes
        for other in sorted(self._taken, key=lambda region: region.start):
            if other.start - start >= whole:
                break
            start = max(start, other.end)
        region = Region(start, start + whole)
        self._taken.add(region)
        return region

    def _whole(self, bytes_: int) -> int:
        return -(-max(bytes_, 1) // self.align) * self.align


def packed(sizes: Sequence[int], align: int) -> tuple[list[int], int]:
    """The offsets of parts that lie one behind the other, each a multiple of ``align``, and where the last
    one ends.

    >>> packed([10, 3], 64)
    ([0, 64], 67)
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // align) * align)
        end = starts[-1] + size
    return starts, end
