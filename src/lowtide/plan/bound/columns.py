"""The columns of the bound's linear program: which values may stay, which operations may run again, which
values may move and how, and what is in memory when. `lowtide.plan.bound.relaxation` says the program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from lowtide.plan.bound.program import Floats, Program
from lowtide.plan.data import Links, Move
from lowtide.plan.simulate.closure import replay_set
from lowtide.plan.simulate.index import bytes_over_time
from lowtide.plan.simulate.simulator import Simulator
from lowtide.plan.split.stages import Stages

Spans = list[tuple[int, int]]
"""half-open, in events"""


class Columns:
    """The decisions of one step graph, relaxed to shares between 0 and 1: values, operations and moves, in
    this order.

    Args:
        sim: the step.
        stages: of its forward.
        placements: value -> the ways in which it may move.
        links: speeds of tiers and groups.
    """

    def __init__(
        self,
        sim: Simulator,
        stages: Stages,
        placements: Mapping[int, Sequence[Move]],
        links: Links,
    ) -> None:
        self.sim, self.stages, self.links = sim, stages, links
        self.demanded = [v for v in sim.droppable if v in sim.last_unpack]
        evictable = [v for v in self.demanded if not sim.must[v]]
        operations = replay_set(evictable, sim.producer, sim.reads, sim.must)
        self.values = sorted({*self.demanded, *(u for index in operations for u in sim.reads[index])})
        self.operations = sorted(operations)
        self.column = {v: k for k, v in enumerate(self.values)}
        self.op_column = {i: len(self.values) + k for k, i in enumerate(self.operations)}
        self.held_until = self._surely_held()
        self._hand_out()
        self._find_spans()
        self.moves = [m for v in self.demanded for m in placements.get(v, ())]
        self.first_move = len(self.values) + len(self.operations)
        self.count = self.first_move + len(self.moves)
        """how many columns decide"""
        self._moving: dict[int, list[tuple[int, Move]]] = {}
        for column, m in enumerate(self.moves, self.first_move):
            self._moving.setdefault(m.value, []).append((column, m))
        self._tabulate()

    # ---- what a decision costs and allows --------------------------------------------------------

    def seconds_of(self, index: int) -> float:
        """What one more run of an operation costs."""
        return self.sim.graph.operations[index].seconds + self.sim.graph.replay_overhead_seconds

    def seconds_to_move(self, m: Move) -> float:
        """What moving takes from the device, whatever it hides behind."""
        link = self.links.get(m.tier)
        busy = link.busy * link.there_and_back(m.encoded_bytes) if link else 0.0
        return m.encode_seconds + m.decode_seconds + self.sim.graph.replay_overhead_seconds + busy

    def replay_column(self, value: int) -> int | None:
        """The column of the operation that brings ``value`` back, if any may."""
        return self.op_column.get(self.sim.producer[value])

    def moves_of(self, value: int, replayed_from: bool = False) -> list[tuple[int, float]]:
        """Entries that are -1 when ``value`` waits elsewhere (so that a replay may read it)."""
        rows = self._moving.get(value, ())
        return [(column, -1.0) for column, m in rows if m.replayable_from or not replayed_from]

    def available(self, value: int) -> list[tuple[int, float]]:
        """Entries that are -1 when an operation can read ``value``: it is stored, replayed, or waits
        elsewhere.
        """
        entries = [(self.column[value], -1.0)] if self.sim.graph.values[value].storable else []
        return [*entries, *self.replayed(value), *self.moves_of(value, replayed_from=True)]

    def replayed(self, value: int) -> list[tuple[int, float]]:
        """The entry that is -1 when ``value`` is replayed, if it may be."""
        column = self.replay_column(value)
        return [] if column is None else [(column, -1.0)]

    def base_program(self) -> Program:
        """Columns and rows without memory and transfers."""
        program = Program()
        for v in self.values:
            program.column(upper=0.0 if v in self.sim.forced else 1.0)
        for i in self.operations:
            program.column(self.seconds_of(i))
        for m in self.moves:
            program.column(self.seconds_to_move(m))
        for v in self.demanded:
            program.row([(self.column[v], -1.0), *self.replayed(v), *self.moves_of(v)], -1.0)
        for i in self.operations:
            for u in self.sim.reads[i]:
                program.row([(self.op_column[i], 1.0), *self.available(u)], 0.0)
        return program

    def point_of(self, stored: Collection[int], replayed: Collection[int]) -> Floats:
        """Whole decisions as a point of the program; nothing moves."""
        again = set(replayed)
        point = [*(v in stored for v in self.values), *(i in again for i in self.operations)]
        return np.array([*point, *([False] * len(self.moves))], dtype=np.float64)

    def forced(self) -> Floats:
        """As a point, the least share of every value's bytes that each schedule holds: all of what is
        demanded and may neither be replayed nor move.
        """
        least = np.zeros(self.count)
        for v in self.demanded:
            rows = self._moving.get(v, ())
            if self.replay_column(v) is None:
                shares = [0.0 if m.tier else m.encoded_bytes / max(1, m.bytes) for _, m in rows]
                least[self.column[v]] = min([1.0, *shares])
        return least

    # ---- memory ----------------------------------------------------------------------------------

    def _surely_held(self) -> dict[int, int]:
        """Operation -> the event until which what it reads is held at least, if it runs again.

        An operation runs again because one of its outputs is not stored: a saved one, which then depends on
        what the operation reads until its own last unpack, or one that another replay reads.
        """
        sim = self.sim
        by_reader: dict[int, int] = {}
        until: dict[int, int] = {}
        for index in reversed(self.operations):
            op = sim.graph.operations[index]
            here = min(
                (sim.last_unpack.get(w, by_reader.get(w, sim.end)) for w in op.writes if w in self.column),
                default=sim.end,
            )
            until[index] = here
            for u in op.reads:
                by_reader[u] = min(by_reader.get(u, here), here)
        return until

    def _hand_out(self) -> None:
        """The bytes that every schedule holds at each event: the program's own, and what backward has
        unpacked. Several versions of one storage may be handed out at once, and all of them be one block: it
        counts once.
        """
        sim = self.sim
        handed: dict[int, Spans] = {}
        for value in self.demanded:
            sid = sim.storage_of[value]
            for tensor in sim.saved_of[value]:
                spans = [(max(start, sim.natural_end[sid]), until) for start, until in sim.unpacks[tensor]]
                handed.setdefault(sid, []).extend(s for s in spans if s[0] < s[1])
        changes: list[tuple[int, int]] = []
        for sid in handed:
            handed[sid], size = _merged(handed[sid]), sim.graph.storages[sid].bytes
            for start, stop in handed[sid]:
                changes += ((start, size), (stop, -size))
        self.handed = {value: handed.get(sim.storage_of[value], []) for value in self.values}
        self.fixed = sim.natural_live + bytes_over_time(changes, sim.end) + sim.scratch

    def _find_spans(self) -> None:
        """Per value, the events between which a stored copy is surely extra (`span`)."""
        sim = self.sim
        self.span: dict[int, tuple[int, int]] = {}
        for value in self.values:
            dead = sim.natural_end[sim.storage_of[value]]
            holds = [self.held_until[i] for i in sim.readers[value] if i in self.op_column]
            until = sim.last_unpack[value] if value in sim.last_unpack else min(holds, default=-1)
            if sim.graph.values[value].storable and dead < until:
                self.span[value] = (dead, until)

    def _tabulate(self) -> None:
        """One row for each stretch of time in which a column takes memory: column, begin, end, bytes, and the
        value that a window counts in its own way, or -1.
        """
        sim, rows = self.sim, list[tuple[int, int, int, int, int]]()
        for value, span in self.span.items():
            size = sim.value_bytes[value]
            rows += [(self.column[value], a, b, size, value) for a, b in _outside(self.handed[value], *span)]
        for k, m in enumerate(self.moves, self.first_move):
            if not m.tier:
                born = sim.op_event[sim.producer[m.value]]
                rows.append((k, born, sim.last_unpack[m.value], m.encoded_bytes, -1))
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, 5)

    def occupancy(self, point: Floats) -> Floats:
        """Bytes of stored and encoded values at every event, those handed out left aside (they are in
        ``fixed``).
        """
        column, start, stop, size, _ = self._rows.T
        amount, change = size * point[column], np.zeros(self.sim.end + 1)
        np.add.at(change, start, amount)
        np.subtract.at(change, stop, amount)
        return np.cumsum(change[:-1])

    def held_at(self, event: int, without: Collection[int] = ()) -> list[tuple[int, float]]:
        """Entries of the stored and encoded values that take memory at ``event``."""
        _, start, stop, _, _ = self._rows.T
        there = self._rows[(start <= event) & (event < stop)].tolist()
        return [(column, float(size)) for column, _, _, size, value in there if value not in without]


def _merged(spans: Spans) -> Spans:
    """The union of spans."""
    merged: Spans = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _outside(handed: Spans, start: int, until: int) -> Spans:
    """The parts of ``start`` to ``until`` that lie outside ``handed``."""
    pieces: Spans = []
    for a, b in handed:
        if a > start:
            pieces.append((start, min(a, until)))
        start = max(start, b)
    if start < until:
        pieces.append((start, until))
    return [(a, b) for a, b in pieces if a < b]
