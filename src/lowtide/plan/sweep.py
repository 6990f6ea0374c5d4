"""Beam search for offsets below a capacity, in the order of time.

A training step repeats itself, layer by layer or token by token, and a layout fits it when each repetition leaves the room as the next one needs it. That is
decided locally in time, which neither orders by size nor a search from the floor up can see. So buffers are placed as they are born, at either end of
any gap that holds them, and of the partial layouts those go on that will have the fewest holes as what lives now dies, where a moment counts
the more the closer its load is to the capacity (to the eighth power). Partial layouts that will never differ again are one. Forward and backward in time, and
wider as long as there is time.

`sweep.cpp` is the search; without a C++ compiler there is none, and `lowtide.plan.layout` goes on to the next one.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def sweep(first: Numbers, last: Numbers, size: Numbers, capacity: int, seconds: float) -> Numbers | None:
    """Offsets below ``capacity`` for buffers that live in sections ``first`` to ``last`` (half open), or ``None`` where none are found.

    >>> found = sweep(np.array([0, 0, 1]), np.array([1, 2, 2]), np.array([4, 4, 4]), 8, 1.0)
    >>> found is None or sorted(int(at) for at in found) in ([0, 0, 4], [0, 4, 4])
    True
    """
    library = _library()
    if library is None:
        return None
    begin, end = np.ascontiguousarray(first, np.int32), np.ascontiguousarray(last, np.int32)
    sizes, offsets = np.ascontiguousarray(size, np.int64), np.zeros(len(size), np.int64)
    found = library.lowtide_sweep(
        len(sizes),
        begin.ctypes.data_as(ctypes.c_void_p),
        end.ctypes.data_as(ctypes.c_void_p),
        sizes.ctypes.data_as(ctypes.c_void_p),
        int(end.max(initial=0)),
        ctypes.c_int64(capacity),
        ctypes.c_double(seconds),
        offsets.ctypes.data_as(ctypes.c_void_p),
    )
    return offsets if found else None


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    from lowtide.native import load

    return load(Path(__file__).with_name("sweep.cpp"))
