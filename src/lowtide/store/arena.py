"""Offsets within one slab, so that no step allocates: a static layout for what is expected, first fit above
it for what is not.

ZeRO-R's M_D (arXiv 1910.02054, section 6.3) and OneFlow's static memory reuse: what a step stores is the same
in every step, so where it lies is worked out once, by whoever knows the lifetimes. A second forward before
the first one's backward finds its places taken and gets others, which are reused by size.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Region:
    """Bytes from ``start`` to ``end`` of a slab."""

    start: int
    end: int


class Arena:
    """Takes and frees regions; keeps no bytes itself.

    Args:
        align: regions begin at multiples of this.

    Attributes:
        static_bytes: what the static layout takes.
        taken_bytes: bytes of the regions that are taken now.

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
        self.taken_bytes = 0
        self._static: list[Region] = []
        self._taken: list[Region] = []
        """in order"""

    def expect(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Keep these places for what every step takes from now on."""
        self._static = [
            Region(at, at + self._whole(bytes_)) for at, bytes_ in zip(offsets, sizes, strict=True)
        ]
        ends = (region.end for region, bytes_ in zip(self._static, sizes, strict=True) if bytes_)
        self.static_bytes = max(self.static_bytes, max(ends, default=0))

    def take(self, bytes_: int, number: int = -1) -> Region:
        """A region of at least ``bytes_``: the ``number``-th of the layout when it is free, else the lowest
        that is free above the layout.
        """
        whole = self._whole(bytes_)
        if 0 <= number < len(self._static):
            region = self._static[number]
            if region.end - region.start >= whole and not self._meets(region):
                return self._took(region)
        start = self.static_bytes
        for other in self._taken:
            if other.start - start >= whole:
                break
            start = max(start, other.end)
        return self._took(Region(start, start + whole))

    def free(self, region: Region) -> None:
        """Give a region back."""
        self._taken.remove(region)
        self.taken_bytes -= region.end - region.start

    def _took(self, region: Region) -> Region:
        insort(self._taken, region)
        self.taken_bytes += region.end - region.start
        return region

    def _meets(self, region: Region) -> bool:
        return any(other.start < region.end and region.start < other.end for other in self._taken)

    def _whole(self, bytes_: int) -> int:
        return -(-max(bytes_, 1) // self.align) * self.align
