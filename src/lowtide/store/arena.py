"""Offsets within one slab, so that no step allocates: a static layout for what is expected, first fit above
it for what is not.

ZeRO-R's M_D (arXiv 1910.02054, section 6.3) and OneFlow's static memory reuse: a step stores the same as
the one before, so a layout is made once from the lifetimes. A second forward before
the first one's backward finds its places taken and gets others, which are reused by size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Region:
    """Bytes from ``start`` to ``end`` of a slab, taken while this object lives."""

    start: int
    end: int


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
        self._taken: list[weakref.ref[Region]] = []

    @property
    def taken_bytes(self) -> int:
        """Bytes of the regions that are taken now."""
        return sum(region.end - region.start for region in self._regions())

    def expect(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Keep these places for what every step takes from now on."""
        self._static = [(at, at + self._whole(bytes_)) for at, bytes_ in zip(offsets, sizes, strict=True)]
        ends = (end for (_, end), bytes_ in zip(self._static, sizes, strict=True) if bytes_)
        self.static_bytes = max(self.static_bytes, max(ends, default=0))

    def take(self, bytes_: int, number: int = -1) -> Region:
        """A region of at least ``bytes_``: the ``number``-th of the layout when it is free, else the lowest
        that is free above the layout.
        """
        whole, taken = self._whole(bytes_), self._regions()
        start, end = self._static[number] if 0 <= number < len(self._static) else (0, 0)
        if end - start < whole or any(other.start < end and start < other.end for other in taken):
            start = self.static_bytes
            for other in taken:
                if other.start - start >= whole:
                    break
                start = max(start, other.end)
            end = start + whole
        region = Region(start, end)
        self._taken = [weakref.ref(other) for other in (*taken, region)]
        return region

    def _regions(self) -> list[Region]:
        """Those that are taken, in order."""
        found = [region for reference in self._taken if (region := reference()) is not None]
        return sorted(found, key=lambda region: region.start)

    def _whole(self, bytes_: int) -> int:
        return -(-max(bytes_, 1) // self.align) * self.align
