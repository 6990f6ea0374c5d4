"""Static layouts: valid, at the bound where that is known to be possible, exact where it can be
enumerated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from lowtide.errors import BudgetError, PlanError
from lowtide.extensions.moves import layout as module
from lowtide.extensions.moves.layout import Layout, _first_fit, check, find, pack, sweep
from lowtide.native import load

Buffers = tuple[list[int], list[int], list[int]]

searches = pytest.mark.skipif(
    load(Path(module.__file__).with_name("packing.cpp")) is None,
    reason="needs a C++ compiler",
)


def cut_square(count: int, seed: int, share: float, units: int = 256) -> Buffers:
    """A perfect packing: a square cut into ``count`` rectangles; ``share`` of the cuts in time fall on
    moments of earlier cuts.
    """
    source = np.random.default_rng(seed)
    parts, moments = [(0, units, 0, units)], {0, units}
    while len(parts) < count:
        areas = np.array([(b - a) * (d - c) for a, b, c, d in parts], float)
        a, b, c, d = parts.pop(int(source.choice(len(parts), p=areas / areas.sum())))
        if source.random() < 0.5 and b - a > 1:
            inside = sorted(t for t in moments if a < t < b)
            at = (
                int(source.choice(inside))
                if inside and source.random() < share
                else int(source.integers(a + 1, b))
            )
            moments.add(at)
            parts += [(a, at, c, d), (at, b, c, d)]
        elif d - c > 1:
            at = int(source.integers(c + 1, d))
            parts += [(a, b, c, at), (a, b, at, d)]
        else:
            parts.append((a, b, c, d))
    source.shuffle(parts)
    return [p[0] for p in parts], [p[1] for p in parts], [p[3] - p[2] for p in parts]


buffers = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8), st.integers(0, 20)), max_size=25)


@settings(max_examples=150, deadline=None)
@given(buffers, st.sampled_from([1, 4, 7]))
def test_nothing_overlaps(found: list[tuple[int, int, int]], align: int) -> None:
    lower, upper, size = [b[0] for b in found], [b[0] + b[1] for b in found], [b[2] for b in found]
    result = find(lower, upper, size, align=align, seconds=0.3)
    assert all(offset % align == 0 for offset in result.offsets)
    assert check(lower, upper, size, result.offsets) <= max(result.height, max(size, default=0))
    most = max(
        (sum(s for a, b, s in zip(lower, upper, size, strict=True) if a <= t < b) for t in range(21)),
        default=0,
    )
    assert result.height >= most
    assert result.bound >= most


GAP = [
    (0, 1, 6),
    (0, 2, 2),
    (1, 2, 2),
    (0, 3, 1),
    (1, 3, 3),
    (1, 4, 1),
    (2, 5, 4),
    (3, 5, 4),
    (4, 6, 1),
    (5, 6, 7),
    (5, 6, 1),
]
"""Eleven buffers that fill nine bytes at every moment and cannot be laid out in nine: such sets are rare."""


def exists(buffers: list[tuple[int, int, int]], capacity: int, offsets: tuple[int, ...] = ()) -> bool:
    """Whether there is a layout, by trying every offset of every buffer."""
    k = len(offsets)
    if k == len(buffers):
        return True
    begin, end, size = buffers[k]
    others = [(at, at + s) for (a, b, s), at in zip(buffers, offsets, strict=False) if a < end and begin < b]
    free = (
        at for at in range(capacity - size + 1) if all(top <= at or at + size <= low for low, top in others)
    )
    return any(exists(buffers, capacity, (*offsets, at)) for at in free)


def saturated(source: np.random.Generator, capacity: int, sections: int) -> list[tuple[int, int, int]]:
    """Buffers that fill ``capacity`` at every moment, though no packing may exist."""

    def split(total: int) -> list[int]:
        parts = []
        while total:
            parts.append(int(source.integers(1, total + 1)))
            total -= parts[-1]
        return parts

    live, done = [(0, size) for size in split(capacity)], []
    for t in range(1, sections):
        ends = [source.random() < 0.5 for _ in live]
        done += [(begin, t, size) for (begin, size), end in zip(live, ends, strict=True) if end]
        freed = sum(size for (_, size), end in zip(live, ends, strict=True) if end)
        live = [buffer for buffer, end in zip(live, ends, strict=True) if not end] + [
            (t, size) for size in split(freed)
        ]
    return done + [(begin, sections, size) for begin, size in live]


@searches
def test_the_search_is_exact() -> None:
    source = np.random.default_rng(3)
    cases = [GAP, *(saturated(source, 9, 5) for _ in range(40))]
    for buffers in cases:
        lower, upper, size = (np.array([b[k] for b in buffers]) for k in range(3))
        for capacity in (9, 10):
            found = pack(lower, upper, size, capacity, 20.0)
            if buffers is GAP or len(buffers) <= 9:
                assert found.outcome == ("found" if exists(buffers, capacity) else "impossible")
            assert (found.outcome == "impossible") is (buffers is GAP and capacity == 9)
            if found.offsets is not None:
                assert check(lower, upper, size, found.offsets) <= capacity


@searches
def test_a_proof_that_nothing_fits_raises_the_bound() -> None:
    lower, upper, size = ([b[k] for b in GAP] for k in range(3))
    for capacity in (None, 9, 10):
        found = find(lower, upper, size, capacity, seconds=60.0)
        assert found.height == 10
        assert (found.bound, found.proved) == ((9, False) if capacity == 10 else (10, True))
    with pytest.raises(BudgetError, match=r"lower bound is 10 .*no layout is lower") as error:
        lowtide.layout(lower, upper, size, capacity=9)
    assert error.value.smallest_bytes == 10


@searches
@pytest.mark.parametrize(("count", "share"), [(40, 0.0), (120, 0.0), (60, 0.5)])
def test_perfect_packings_are_found(count: int, share: float) -> None:
    lower, upper, size = (np.array(a) for a in cut_square(count, count, share))
    times = np.unique(np.concatenate([lower, upper]))
    found = pack(np.searchsorted(times, lower), np.searchsorted(times, upper), size, 256, 60.0)
    assert found.offsets is not None
    assert check(lower, upper, size, found.offsets) == 256


def test_a_capacity_below_the_bound_is_refused_with_the_smallest_known() -> None:
    with pytest.raises(BudgetError, match=r"no layout within 7 bytes.*lower bound is 8") as error:
        lowtide.layout([0, 1], [2, 3], [4, 4], capacity=7)
    assert error.value.smallest_bytes == 8
    assert lowtide.layout([0, 1], [2, 3], [4, 4], capacity=8).tolist() in ([0, 4], [4, 0])


def test_any_layout_within_the_capacity_will_do() -> None:
    lower, upper, size = cut_square(200, 5, 0.7)
    result = find(lower, upper, size, capacity=400, seconds=1.0)
    assert isinstance(result, Layout) and result.source.startswith("greedy") and result.height <= 400


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([0], [1, 2], [3]), "1, 2, 1 entries"),
        (([5], [1], [3]), "buffer 0 dies at 1, before it is born at 5"),
        (([0], [1], [-3]), "buffer 0 has -3 bytes"),
        (([0.5], [1], [3]), "whole numbers"),
    ],
)
def test_malformed_buffers_are_named(arguments: tuple[list[int], list[int], list[int]], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        lowtide.layout(*arguments)


def test_zero_sizes_and_empty_lives_take_no_room() -> None:
    assert find([], [], []).height == 0
    assert find([0, 3, 2], [5, 3, 4], [0, 10, 6]).height == 6


@searches
def test_what_repeats_is_laid_out_in_the_order_of_time() -> None:
    """A small buffer that outlives the next one's birth, and a large one between: the large one has to go up
    and down by turns.
    """
    rounds = 40
    small = [(10 * k, 10 * k + 11, 1) for k in range(rounds)]
    large = [(10 * k + 5, 10 * k + 7, 8) for k in range(rounds)]
    lower, upper, size = (np.array([b[k] for b in small + large]) for k in range(3))
    by_size = _first_fit(lower, upper, size, np.argsort(-size, kind="stable"))
    assert check(lower, upper, size, by_size) == 10
    offsets = sweep(lower, upper, size, 9, 10.0).offsets
    assert offsets is not None and check(lower, upper, size, offsets) == 9
    assert find(lower, upper, size, seconds=10.0).height == 9


@searches
def test_a_swept_layout_is_one() -> None:
    source = np.random.default_rng(4)
    found = 0
    for buffers in [GAP, *(saturated(source, 9, 8) for _ in range(60))]:
        lower, upper, size = (np.array([b[k] for b in buffers]) for k in range(3))
        offsets = sweep(lower, upper, size, 9, 5.0).offsets
        assert offsets is None or (buffers is not GAP and check(lower, upper, size, offsets) <= 9)
        found += offsets is not None
    assert found > 50
