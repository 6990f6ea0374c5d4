"""Exact search for offsets below a capacity, for buffers with fixed lifetimes.

In: for each buffer its first and its past-the-last section (lifetimes cut at every begin and end), its size,
and a capacity. Out: offsets, proof that there are none, or neither when the time is up.

Every packing can be pushed down until each buffer stands on the floor or on another one, so it can be built
from below, one corner at a
time: in a *valley* of the skyline (a run of sections whose neighbours stand higher) the lower left corner
belongs to a buffer that begins there and ends within the valley, or it stays empty, which wastes bytes that
its sections have to be able to spare. Either corner of any valley may be decided first; the one with the
fewest choices is, and one without any ends the branch. Buffers whose tops meet a wall's height exactly, or
that fill the valley's width, are tried first, every other time: sizes seldom agree by chance. Between a
valley's walls only those can lie that live wholly within it; where they are too few to reach the lower wall,
the branch ends. Parts of time that no unplaced buffer joins are solved one by one, states that failed are
remembered, and the search starts over with other orders, after few states mostly (Luby, Sinclair and
Zuckerman 1993): what an order does not solve soon, it seldom solves late. The canonical form is that of
MiniMalloc (Moffitt, ASPLOS 2023, section 4); the corners are those of perfect rectangle packing.

`packing.cpp` is the same search compiled; this module falls back to Python where there is no compiler.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Outcome = Literal["found", "impossible", "stopped"]
_OUTCOMES: dict[int, Outcome] = {0: "impossible", 1: "found", 2: "stopped"}
_WALL = 1 << 61
_REMEMBERED = 1 << 20
_FIRST_NODES = 400
_NOISE = 4.0


class Packing(NamedTuple):
    """What a search ended with.

    Attributes:
        outcome: ``found``, ``impossible`` (no offsets exist below the capacity) or ``stopped`` (the time was
            up).
        offsets: one for each buffer, where found.
        nodes: how many states it looked at.
    """

    outcome: Outcome
    offsets: Numbers | None
    nodes: int


def pack(
    first: Numbers, last: Numbers, size: Numbers, capacity: int, seconds: float, *, compiled: bool = True
) -> Packing:
    """Offsets below ``capacity`` for buffers that live in sections ``first`` to ``last`` (half open), or the
    proof that there are none.
    """
    library = _library() if compiled else None
    if library is None:
        return _Search(first.tolist(), last.tolist(), size.tolist(), capacity).run(seconds)
    nodes = ctypes.c_int64(0)
    given, offsets = arguments(first, last, size, capacity, seconds)
    outcome = library.lowtide_pack(*given, ctypes.byref(nodes))
    return Packing(_OUTCOMES[outcome], offsets if outcome == 1 else None, nodes.value)


def arguments(
    first: Numbers, last: Numbers, size: Numbers, capacity: int, seconds: float
) -> tuple[list[Any], Numbers]:
    """What the compiled searches are called with, the place of the offsets last, and the offsets."""
    begin, end = np.ascontiguousarray(first, np.int32), np.ascontiguousarray(last, np.int32)
    sizes, offsets = np.ascontiguousarray(size, np.int64), np.zeros(len(size), np.int64)
    buffers = [array.ctypes.data_as(ctypes.c_void_p) for array in (begin, end, sizes)]
    limits = [int(end.max(initial=0)), ctypes.c_int64(capacity), ctypes.c_double(seconds)]
    return [len(sizes), *buffers, *limits, offsets.ctypes.data_as(ctypes.c_void_p)], offsets


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    from lowtide.native import load

    return load(Path(__file__).with_name("packing.cpp"))


def _luby(number: int) -> int:
    """1 1 2 1 1 2 4 1 1 2 ...: how long each round searches.

    >>> [_luby(k) for k in range(1, 10)]
    [1, 1, 2, 1, 1, 2, 4, 1, 1]
    """
    power = 1 << (number.bit_length() - 1)
    return power if number == 2 * power - 1 else _luby(number - power + 1)


class _Stopped(Exception):
    """Time or nodes are used up."""


class _Search:
    """The search in Python; `packing.cpp` says the same with the same names."""

    def __init__(self, first: list[int], last: list[int], size: list[int], capacity: int) -> None:
        self.first, self.last, self.size, self.capacity = first, last, size, capacity
        self.sections = max(last, default=0)
        self.floor = [0] * self.sections
        self.remaining = [0] * self.sections
        self.crossing = [0] * (self.sections + 1)
        self.starts: list[list[int]] = [[] for _ in range(self.sections)]
        self.ends: list[list[int]] = [[] for _ in range(self.sections + 1)]
        self.placed = [False] * len(size)
        self.offset = [0] * len(size)
        self.dead: set[int] = set()
        source = random.Random(1)
        self.key = [source.getrandbits(64) for _ in size]
        for b, (begin, end) in enumerate(zip(first, last, strict=True)):
            for s in range(begin, end):
                self.remaining[s] += size[b]
                self.crossing[s] += s > begin
            self.starts[begin].append(b)
            self.ends[end].append(b)
        self.nodes = self.limit = 0
        self.deadline = 0.0
        self.by_fit = True

    def run(self, seconds: float) -> Packing:
        """Search with growing effort under changing orders."""
        if any(bytes_ > self.capacity for bytes_ in self.remaining):
            return Packing("impossible", None, 0)
        self.deadline = time.monotonic() + seconds
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(max(before, 6 * len(self.size) + 2000))
        try:
            for number in range(1 << 30):
                self._order(number % 4, number // 4)
                self.limit = self.nodes + _FIRST_NODES * _luby(number // 4 + 1)
                try:
                    found = self._solve(0, self.sections)
                except _Stopped:
                    if time.monotonic() > self.deadline:
                        break
                    continue
                offsets = np.array(self.offset, dtype=np.int64) if found else None
                return Packing("found" if found else "impossible", offsets, self.nodes)
        finally:
            sys.setrecursionlimit(before)
        return Packing("stopped", None, self.nodes)

    def _order(self, order: int, seed: int) -> None:
        source = random.Random(seed)
        self.by_fit = seed % 2 == 0
        measures = (
            lambda b: self.last[b] - self.first[b],
            lambda b: self.size[b],
            lambda b: (self.last[b] - self.first[b]) * self.size[b],
            lambda b: 1 / (self.last[b] - self.first[b]),
        )
        rank = [
            measures[order](b) * (1 + _NOISE * source.random() * (seed > 0)) for b in range(len(self.size))
        ]
        for lists in (self.starts, self.ends):
            for entries in lists:
                entries.sort(key=lambda b: (-rank[b], b))

    def _height(self, s: int) -> int:
        return self.floor[s] if self.remaining[s] else _WALL

    def _move(self, b: int, at: int, down: bool) -> None:
        self.placed[b] = down
        self.offset[b] = at
        size, first = self.size[b], self.first[b]
        for s in range(first, self.last[b]):
            self.floor[s] = at + size if down else at
            self.remaining[s] += -size if down else size
            self.crossing[s] += (s > first) * (-1 if down else 1)

    def _solve(self, begin: int, end: int) -> bool:
        parts: list[tuple[int, int]] = []
        s = begin
        while s < end:
            if not self.remaining[s]:
                s += 1
                continue
            stop = s + 1
            while stop < end and self.crossing[stop]:
                stop += 1
            parts.append((s, stop))
            s = stop
        if len(parts) == 1:
            return self._part(*parts[0])
        saved = [
            self.floor[begin:end],
            self.remaining[begin:end],
            self.crossing[begin:end],
            list(self.placed),
        ]
        for part in sorted(parts, key=lambda p: p[1] - p[0]):
            solved = False
            try:
                solved = self._part(*part)
            finally:
                if not solved:
                    (
                        self.floor[begin:end],
                        self.remaining[begin:end],
                        self.crossing[begin:end],
                        self.placed[:],
                    ) = saved
            if not solved:
                return False
        return True

    def _part(self, begin: int, end: int) -> bool:
        self.nodes += 1
        if self.nodes > self.limit or (not self.nodes & 63 and time.monotonic() > self.deadline):
            raise _Stopped
        unplaced = 0
        for s in range(begin, end):
            for b in self.starts[s]:
                if not self.placed[b]:
                    unplaced ^= self.key[b]
        state = hash((begin, end, unplaced, *map(self._height, range(begin, end))))
        if state in self.dead:
            return False
        best = self._tightest(begin, end)
        for b, start, stop, height in best:
            if b >= 0:
                self._move(b, height, True)
                try:
                    if self._solve(begin, end):
                        return True
                except _Stopped:
                    self._move(b, height, False)
                    raise
                self._move(b, height, False)
            else:
                before = self.floor[start:stop]
                self.floor[start:stop] = [height] * (stop - start)
                try:
                    if self._solve(begin, end):
                        return True
                except _Stopped:
                    self.floor[start:stop] = before
                    raise
                self.floor[start:stop] = before
        if len(self.dead) < _REMEMBERED:
            self.dead.add(state)
        return False

    def _tightest(self, begin: int, end: int) -> list[tuple[int, int, int, int]]:
        """The choices of the corner that has the fewest."""
        best: list[tuple[int, int, int, int]] | None = None
        s = begin
        while s < end:
            here, stop = self._height(s), s + 1
            while stop < end and self._height(stop) == here:
                stop += 1
            left = self._height(s - 1) if s > begin else _WALL
            right = self._height(stop) if stop < end else _WALL
            if here < min(left, right):
                if not self._supplied(s, stop, min(left, right)):
                    return []
                for from_left in (True, False):
                    found = self._choices(s, stop, here, left, right, from_left)
                    if best is None or len(found) < len(best):
                        best = found
                    if len(best) <= 1:
                        return best
            s = stop
        return best or []

    def _supplied(self, begin: int, end: int, wall: int) -> bool:
        """Only what lives wholly within the valley's time can lie between its walls: the rest of each section
        has to fit above the lower one.
        """
        if wall >= _WALL:
            return True
        inside = [
            b for s in range(begin, end) for b in self.starts[s] if not self.placed[b] and self.last[b] <= end
        ]
        own = [0] * (end - begin)
        for b in inside:
            for s in range(self.first[b], self.last[b]):
                own[s - begin] += self.size[b]
        return all(wall + self.remaining[s] - own[s - begin] <= self.capacity for s in range(begin, end))

    def _choices(
        self, begin: int, end: int, height: int, left: int, right: int, from_left: bool
    ) -> list[tuple[int, int, int, int]]:
        first, last, size = self.first, self.last, self.size
        inside = [
            b for s in range(begin, end) for b in self.starts[s] if not self.placed[b] and last[b] <= end
        ]
        corner = [b for b in (self.starts[begin] if from_left else self.ends[end]) if not self.placed[b]]
        corner = [b for b in corner if first[b] >= begin and last[b] <= end]
        kinds = {(first[b], last[b], size[b]): b for b in reversed(corner)}
        found = [b for b in corner if kinds[first[b], last[b], size[b]] == b]
        if self.by_fit:
            found.sort(
                key=lambda b: (
                    -(
                        (height + size[b] == left)
                        + (height + size[b] == right)
                        + (first[b] == begin and last[b] == end)
                    )
                )
            )
        choices = [(b, 0, 0, height) for b in found]
        start, stop = begin, end
        if from_left:
            stop = min([end, *(first[b] for b in inside if first[b] > begin)])
        else:
            start = max([begin, *(last[b] for b in inside if last[b] < end)])
        raised = min(left, right, height + min((size[b] for b in inside), default=_WALL))
        if raised < _WALL and all(raised + self.remaining[s] <= self.capacity for s in range(start, stop)):
            choices.append((-1, start, stop, raised))
        return choices
