"""Beam search for offsets below a capacity, in the order of time.

A training step repeats itself, layer by layer or token by token, and a layout fits it when each repetition
leaves the room as the next one needs it. That is decided locally in time, which neither orders by size nor a
search from the floor up can see. So buffers are placed as they are born, at either end of any gap that holds
them, and of the partial layouts those go on that will have the fewest holes as what lives now dies, where a
moment counts the more the closer its load is to the capacity (to the eighth power). Partial layouts that will
never differ again are one. Forward and backward in time, and wider as long as there is time.

`sweep.cpp` is the search; without a C++ compiler there is none, and `lowtide.plan.layout` goes on to the next
one.
"""

from __future__ import annotations

from pathlib import Path

from lowtide.native import load
from lowtide.plan.layout.packing import Numbers, arguments


def sweep(first: Numbers, last: Numbers, size: Numbers, capacity: int, seconds: float) -> Numbers | None:
    """Offsets below ``capacity`` for buffers that live in sections ``first`` to ``last`` (half open), or
    ``None`` where none are found.

    >>> import numpy as np
    >>> found = sweep(np.array([0, 0, 1]), np.array([1, 2, 2]), np.array([4, 4, 4]), 8, 1.0)
    >>> found is None or sorted(int(at) for at in found) in ([0, 0, 4], [0, 4, 4])
    True
    """
    library = load(Path(__file__).with_name("sweep.cpp"))
    if library is None:
        return None
    given, offsets = arguments(first, last, size, capacity, seconds)
    return offsets if library.lowtide_sweep(*given) else None
