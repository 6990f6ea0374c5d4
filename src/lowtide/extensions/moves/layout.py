"""Where bytes lie: static offsets for buffers with known lifetimes (dynamic storage allocation).

In: when each buffer is born and dies, its size, perhaps a capacity. Out: an offset for each, such that no two
that live at once overlap. No layout is smaller than the most bytes alive at one moment (the *bound*). A
portfolio of greedy orders meets it on most training steps; where it does not, an exact search has a short
try; then a beam search in the order of time and the exact search again, now with the time that is left, look
for offsets at the bound, and then between it and the best known.

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

`packing.cpp` has both; without a C++ compiler there are none, and greedy orders have to do.

*The slab of a plan* (`with_slab`): one block on the device that what was fetched or gathered comes back into,
laid out from the lifetimes that the simulator sees. ZeRO-R's M_D (arXiv 1910.02054, section 6.3) and
OneFlow's static memory reuse: it is allocated once and held for the whole step, so it is part of the
predicted peak.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.errors import BudgetError, PlanError, expect, is_count
from lowtide.extensions.moves.simulate import Transfers, with_moves
from lowtide.native import load
from lowtide.plan.data import Plan
from lowtide.plan.simulate.simulator import Simulator
from lowtide.progress import current

Integers = NDArray[np.int64]
Outcome = Literal["found", "impossible", "stopped"]
_OUTCOMES: dict[int, Outcome] = {0: "impossible", 1: "found", 2: "stopped"}

ALIGN = 512
"""Places in a slab begin at multiples of this, as what PyTorch's allocators give does: kernels choose
their way by it."""

_SLAB_SECONDS = 0.5
"""The most time that a slab's layout is looked for where greedy orders do not meet the bound."""

_EXACT_BUFFERS = 4000
"""Beyond this many buffers the exact search is left out: its depth is their number."""

_TRY = 0.1
"""Share of the seconds for the exact search's first try: what it solves at all, it mostly solves at once."""

_NEAR = (0.001, 0.002, 0.005, 0.01)
"""How far above the bound to look for offsets where none are found at it."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Offsets, and how good they are.

    Attributes:
        offsets: one for each buffer, in bytes (or whatever unit the sizes have).
        height: the first byte above all buffers.
        bound: no layout is lower.
        source: which order or search found it.
        proved: whether none lower exists.
        seconds: time that it took.
    """

    offsets: Integers = field(repr=False)
    height: int
    bound: int
    source: str
    proved: bool
    seconds: float


def layout(
    lower: ArrayLike,
    upper: ArrayLike,
    size: ArrayLike,
    capacity: int | None = None,
    *,
    align: int = 1,
    seconds: float = 60.0,
) -> Integers:
    """Offsets for buffers of ``size`` that live from ``lower`` up to, not including, ``upper``.

    Args:
        lower, upper: half-open lifetimes, whole numbers of any unit.
        size: bytes, zero allowed.
        capacity: the most bytes allowed; ``None`` for as few as can be found.
        align: every offset is a multiple of this.
        seconds: the most time to spend where greedy orders do not meet the bound (or the capacity).

    Returns:
        One offset for each buffer.

    Raises:
        BudgetError: no layout within ``capacity`` exists or was found in time; the error carries the smallest
            height known.
        PlanError: the lifetimes or sizes are malformed.

    Example:
        >>> import lowtide
        >>> lowtide.layout([0, 3, 0, 9, 0], [3, 9, 9, 21, 21], [4, 4, 4, 4, 4], capacity=12).max()
        np.int64(8)
    """
    expect(capacity is None or is_count(capacity), "layout(capacity=)", capacity, "bytes, or None")
    time_given = isinstance(seconds, int | float) and seconds >= 0
    expect(time_given, "layout(seconds=)", seconds, "a number, 0 or more")
    found = find(lower, upper, size, capacity, align=align, seconds=seconds)
    if capacity is not None and found.height > capacity:
        why = (
            "no layout is lower than that bound"
            if found.bound > capacity
            else f"the search stopped after {found.seconds:.1f} s"
        )
        raise BudgetError(
            f"no layout within {capacity:,} bytes: the lower bound is {found.bound:,} and the best one found "
            f"needs {found.height:,} ({why}). Give a larger capacity, or more seconds=",
            found.height,
        )
    return found.offsets


def find(
    lower: ArrayLike,
    upper: ArrayLike,
    size: ArrayLike,
    capacity: int | None = None,
    *,
    align: int = 1,
    seconds: float = 60.0,
) -> Layout:
    """The best layout found, with its bound; the arguments are `layout`'s, and one above ``capacity`` is
    returned, too.
    """
    current().say("placing tensors in memory")
    begin = time.monotonic()
    low, high, sizes = _check_sizes(lower, upper, size, align)
    units = -(-sizes // align)
    alive = np.flatnonzero((units > 0) & (high > low))
    offsets = np.zeros(len(sizes), np.int64)
    if not len(alive):
        return Layout(offsets, 0, 0, "empty", True, 0.0)
    times = np.unique(np.concatenate([low[alive], high[alive]]))
    first, last = np.searchsorted(times, low[alive]), np.searchsorted(times, high[alive])
    first, last, count = first.astype(np.int64), last.astype(np.int64), units[alive]
    bound = int(_load(first, last, count, len(times) - 1).max())
    enough = bound if capacity is None else max(bound, capacity // align)
    best, height, source = _greedy(first, last, count, enough)
    open_ = bound * align <= (capacity if capacity is not None else bound * align)
    small = len(alive) <= _EXACT_BUFFERS
    if enough < height and open_ and small:
        tried = pack(first, last, count, enough, _TRY * seconds)
        if tried.offsets is not None:
            best, height, source = tried.offsets, int((tried.offsets + count).max()), "exact search"
        elif tried.outcome == "impossible":
            bound = enough = enough + 1
            capacity = None  # what is refused is told the least that is found
    targets = [enough, *(enough + int(share * enough) for share in _NEAR if capacity is None)]
    swept = [("beam search", sweep, t, 0.03 if k else 0.1) for k, t in enumerate(targets)]
    exact = [("exact search", pack, t, 0.1 if k else 0.5) for k, t in enumerate(targets)] if small else []
    if capacity is not None and small:
        exact = [("exact search", pack, enough, 1.0)]
    for name, search, target, share in [*swept, *exact] if open_ else ():
        if target >= height:
            continue
        left = seconds - (time.monotonic() - begin)
        found = search(first, last, count, target, min(left, share * seconds)).offsets
        if found is not None:
            # each buffer moves down until it touches another
            found = _first_fit(first, last, count, np.argsort(found, kind="stable"))
            best, height, source = found, int((found + count).max()), name
    proved = height == bound
    offsets[alive] = best * align
    return Layout(offsets, height * align, bound * align, source, proved, time.monotonic() - begin)


def check(lower: ArrayLike, upper: ArrayLike, size: ArrayLike, offsets: ArrayLike) -> int:
    """The height of a layout.

    Raises:
        PlanError: two buffers that live at once overlap.
    """
    low, high, sizes = _check_sizes(lower, upper, size, 1)
    at = np.asarray(offsets, np.int64)
    tops = at + sizes
    real = np.flatnonzero((sizes > 0) & (high > low))
    for place, k in enumerate(real):
        rest = real[place + 1 :]
        meets = (low[rest] < high[k]) & (low[k] < high[rest]) & (at[rest] < tops[k]) & (at[k] < tops[rest])
        if meets.any():
            j = rest[np.argmax(meets)]
            raise PlanError(f"buffers {k} and {j} overlap: [{at[k]}, {tops[k]}) and [{at[j]}, {tops[j]})")
    return int(tops.max(initial=0))


def _check_sizes(
    lower: ArrayLike, upper: ArrayLike, size: ArrayLike, align: int
) -> tuple[Integers, Integers, Integers]:
    arrays = [np.asarray(a) for a in (lower, upper, size)]
    for name, array in zip(("lower", "upper", "size"), arrays, strict=True):
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise PlanError(
                f"{name} has to be a flat list of whole numbers, not {array.dtype} of shape {array.shape}"
            )
    if len({len(a) for a in arrays}) != 1:
        raise PlanError(
            f"lower, upper and size have {', '.join(str(len(a)) for a in arrays)} entries: give one of each "
            "for every buffer"
        )
    low, high, sizes = (a.astype(np.int64) for a in arrays)
    if (high < low).any():
        k = int(np.argmax(high < low))
        raise PlanError(f"buffer {k} dies at {high[k]}, before it is born at {low[k]}")
    if (sizes < 0).any():
        raise PlanError(f"buffer {int(np.argmax(sizes < 0))} has {sizes.min()} bytes: give 0 or more")
    expect(is_count(align, 1), "layout(align=)", align, "a whole number, 1 or more")
    return low, high, sizes


def _load(first: Integers, last: Integers, size: Integers, sections: int) -> Integers:
    change = np.zeros(sections + 1, np.int64)
    np.add.at(change, first, size)
    np.add.at(change, last, -size)
    return np.cumsum(change[:-1])


def _greedy(first: Integers, last: Integers, size: Integers, enough: int) -> tuple[Integers, int, str]:
    """The best of the greedy orders; the first that is at or below ``enough`` ends it."""
    width = last - first
    load = _load(first, last, size, int(last.max()))
    busiest = (
        np.array([load[a:b].max() for a, b in zip(first, last, strict=True)])
        if len(first) <= _EXACT_BUFFERS
        else -first
    )
    orders: dict[str, Sequence[Integers]] = {
        "by size": (first, -width, -size),
        "by area": (first, -size, -(size * width)),
        "by lifetime": (first, -size, -width),
        "by start": (-size, -width, first),
        "by end": (-size, -width, -last),
        "by load": (-width, -size, -busiest),
    }
    best: tuple[Integers, int, str] | None = None
    for name, keys in orders.items():
        offsets = _first_fit(first, last, size, np.lexsort(tuple(keys)))
        height = int((offsets + size).max())
        if best is None or height < best[1]:
            best = offsets, height, f"greedy {name}"
        if height <= enough:
            break
    assert best is not None
    return best


def _first_fit(first: Integers, last: Integers, size: Integers, order: Integers) -> Integers:
    """Each buffer at the lowest place that is free for its whole life, in the given order."""
    count = len(order)
    begins, ends, lows, tops = (np.zeros(count, np.int64) for _ in range(4))
    offsets = np.zeros(count, np.int64)
    for k, b in enumerate(order):
        meets = np.flatnonzero((begins[:k] < last[b]) & (ends[:k] > first[b]))
        at = 0
        if len(meets):
            low, top = lows[meets], tops[meets]
            up = np.argsort(low, kind="stable")
            low, covered = low[up], np.maximum.accumulate(top[up])
            floor = np.concatenate([[0], covered])
            room = np.concatenate([low, [np.iinfo(np.int64).max]]) - floor
            at = int(floor[np.argmax(room >= size[b])])
        offsets[b] = at
        begins[k], ends[k], lows[k], tops[k] = first[b], last[b], at, at + size[b]
    return offsets


class Packing(NamedTuple):
    """What a search ended with.

    Attributes:
        outcome: ``found``, ``impossible`` (no offsets exist below the capacity) or ``stopped`` (the time was
            up).
        offsets: one for each buffer, where found.
    """

    outcome: Outcome
    offsets: Integers | None


def pack(first: Integers, last: Integers, size: Integers, capacity: int, seconds: float) -> Packing:
    """Offsets below ``capacity`` for buffers that live in sections ``first`` to ``last`` (half open), or the
    proof that there are none.
    """
    return _search("lowtide_pack", first, last, size, capacity, seconds)


def sweep(first: Integers, last: Integers, size: Integers, capacity: int, seconds: float) -> Packing:
    """The same by the beam search, which proves nothing.

    >>> found = sweep(np.array([0, 0, 1]), np.array([1, 2, 2]), np.array([4, 4, 4]), 8, 1.0)
    >>> found.offsets is None or sorted(found.offsets.tolist()) in ([0, 0, 4], [0, 4, 4])
    True
    """
    return _search("lowtide_sweep", first, last, size, capacity, seconds)


def _search(
    name: str, first: Integers, last: Integers, size: Integers, capacity: int, seconds: float
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


def with_slab(sim: Simulator, plan: Plan, required: bool = False) -> Plan:
    """The same plan with a slab for the values that come back.

    Args:
        sim: of the step.
        plan: made for it, without a slab.
        required: whether a slab is wanted in any case. Else the plan goes without where one would take the
            step above its budget, or without a budget where it would cost anything.

    Raises:
        BudgetError: it is required, and takes the step above the budget.
    """
    if not plan.moves:
        return plan
    moved = {move.value: move for move in plan.moves}
    held = sim.simulate(plan.stored, with_moves(sim, plan.moves, plan.window_bytes, slab=True))
    spans = held.transfers.spans if isinstance(held.transfers, Transfers) else {}
    sizes = [
        moved[value].encoded_bytes + ALIGN if arriving else moved[value].place_bytes
        for value, arriving in spans
    ]
    begins, ends = zip(*spans.values(), strict=True) if spans else ((), ())
    found = find(begins, ends, sizes, align=ALIGN, seconds=_SLAB_SECONDS)
    places = dict(zip(spans, map(int, found.offsets), strict=True))
    peak = held.peak_bytes + found.height
    most = plan.budget_bytes if plan.budget_bytes is not None else plan.predicted_peak_bytes
    if peak > most and not required:
        return plan
    if plan.budget_bytes is not None and peak > plan.budget_bytes:
        raise sim.refusal(held.with_resident(found.height), plan.budget_bytes, plan.policy)
    moves = tuple(
        replace(move, place=places.get((move.value, False), -1), arrival=places.get((move.value, True), -1))
        for move in plan.moves
    )
    return replace(
        plan,
        moves=moves,
        predicted_peak_bytes=peak,
        loose_peak_bytes=plan.predicted_peak_bytes,
        slab_bytes=found.height,
        peak_module=held.peak_module,
        peak_operation=held.peak_operation.name if held.peak_operation else "",
    )


def without_slab(plan: Plan) -> Plan:
    """The same plan with every value in memory of its own."""
    if not plan.slab_bytes:
        return plan
    moves = tuple(replace(move, place=-1, arrival=-1) for move in plan.moves)
    return replace(
        plan, moves=moves, slab_bytes=0, predicted_peak_bytes=plan.loose_peak_bytes, loose_peak_bytes=0
    )
