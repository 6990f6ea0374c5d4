"""Two searches for offsets below a capacity, for buffers with fixed lifetimes: one that is exact, and one in
the order of time.

In: for each buffer its first and its past-the-last section (lifetimes cut at every begin and end), its size,
and a capacity. Out: offsets, proof that there are none, or neither when time runs out.

*The exact search* (`pack`). Every packing can be pushed down until each buffer lies on the floor or on
another one, so it can be built from below, one corner at a time: in a *valley* of the skyline (a run of
sections whose neighbours are higher) the lower left corner belongs to a buffer that begins there and ends
within the valley, or it stays empty, which wastes bytes that its sections have to be able to spare. Either
corner of any valley may be decided first; the one with the fewest choices is, and one without any ends the
branch. Buffers whose tops meet a wall's height exactly, or that fill the valley's width, are tried first,
every other time: sizes seldom agree by chance. Between a valley's walls only those can lie that live wholly
within it; where they are too few to reach the lower wall, the branch ends. Parts of time that no unplaced
buffer joins are solved one by one, states that failed are remembered, and the search starts over with other
orders, after few states mostly (Luby, Sinclair and Zuckerman 1993): what an order does not solve soon, it
seldom solves late. The canonical form is that of MiniMalloc (Moffitt, ASPLOS 2023, section 4); the corners
are those of perfect rectangle packing.

*The beam search* (`sweep`). A training step repeats itself, layer by layer or token by token, and a layout
fits it when each repetition leaves the gaps that the next one needs. That is decided locally in time, which
neither orders by size nor a search from the floor up can see. So buffers are placed as they are born, at
either end of any gap that holds them, and of the partial layouts those go on that will have the fewest holes
as what lives now dies, where a moment counts the more the closer its load is to the capacity (to the eighth
power). Partial layouts that will never differ again are one. Forward and backward in time, and wider as long
as there is time.

`packing.cpp` has both; without a C++ compiler there are none, and `lowtide.plan.layout` goes on without.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.native import load

Numbers = NDArray[np.int64]
Outcome = Literal["found", "impossible", "stopped"]
_OUTCOMES: dict[int, Outcome] = {0: "impossible", 1: "found", 2: "stopped"}


class Packing(NamedTuple):
    """What a search ended with.

    Attributes:
        outcome: ``found``, ``impossible`` (no offsets exist below the capacity) or ``stopped`` (the time was
            up).
        offsets: one for each buffer, where found.
    """

    outcome: Outcome
    offsets: Numbers | None


def pack(first: Numbers, last: Numbers, size: Numbers, capacity: int, seconds: float) -> Packing:
    """Offsets below ``capacity`` for buffers that live in sections ``first`` to ``last`` (half open), or the
    proof that there are none.
    """
    return _search("lowtide_pack", first, last, size, capacity, seconds)


def sweep(first: Numbers, last: Numbers, size: Numbers, capacity: int, seconds: float) -> Packing:
    """The same by the beam search, which proves nothing.

    >>> found = sweep(np.array([0, 0, 1]), np.array([1, 2, 2]), np.array([4, 4, 4]), 8, 1.0)
    >>> found.offsets is None or sorted(found.offsets.tolist()) in ([0, 0, 4], [0, 4, 4])
    True
    """
    return _search("lowtide_sweep", first, last, size, capacity, seconds)


def _search(
    name: str, first: Numbers, last: Numbers, size: Numbers, capacity: int, seconds: float
) -> Packing:
    library = load(Path(__file__).with_name("packing.cpp"))
    if library is None or seconds <= 0:
        return Packing("stopped", None)
    begin, end = np.ascontiguousarray(first, np.int32), np.ascontiguousarray(last, np.int32)
    sizes, offsets = np.ascontiguousarray(size, np.int64), np.zeros(len(size), np.int64)
    buffers = [array.ctypes.data_as(ctypes.c_void_p) for array in (begin, end, sizes)]
    limits = [int(end.max(initial=0)), ctypes.c_int64(capacity), ctypes.c_double(seconds)]
    outcome = library[name](len(sizes), *buffers, *limits, offsets.ctypes.data_as(ctypes.c_void_p))
    return Packing(_OUTCOMES[outcome], offsets if outcome == 1 else None)
