"""The columns of the bound's linear program: which values may stay, which operations may run again, and what
is in memory when. `lowtide.plan.bound.relaxation` says the program.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lowtide.plan.bound.program import Floats, Program
from lowtide.plan.simulate.closure import replay_set
from lowtide.plan.simulate.simulator import Simulator
from lowtide.plan.split.stages import Stages, find_stages


class Decisions:
    """The decisions of one step graph, relaxed to shares between 0 and 1."""

    def __init__(self, sim: Simulator, stages: Stages | None = None) -> None:
        self.sim = sim
        self.stages = stages or find_stages(sim)
        self.demanded = [v for v in sim.droppable if v in sim.last_unpack]

        def final(value: int) -> bool:
            """Whether nothing brings it back."""
            return sim.producer[value] < 0 or not sim.feasible[sim.producer[value]]

        operations = replay_set([v for v in self.demanded if not final(v)], sim.producer, sim.reads, final)
        self.values = sorted({*self.demanded, *(u for index in operations for u in sim.reads[index])})
        self.operations = sorted(operations)
        self.column = {v: k for k, v in enumerate(self.values)}
        self.op_column = {i: len(self.values) + k for k, i in enumerate(self.operations)}
        self._moments()
        self._rests()

    def seconds_of(self, index: int) -> float:
        """What one more run of an operation costs."""
        return self.sim.graph.operations[index].seconds + self.sim.graph.replay_overhead_seconds

    def replay_column(self, value: int) -> int | None:
        """The column of the operation that brings ``value`` back, if any may."""
        if self.sim.graph.values[value].must_store:
            return None
        return self.op_column.get(self.sim.producer[value])

    def available(self, value: int) -> list[tuple[int, float]]:
        """Entries that are -1 when an operation can read ``value``: it is stored, replayed, or waits
        elsewhere.
        """
        entries = [(self.column[value], -1.0)] if self.sim.graph.values[value].storable else []
        replay = self.replay_column(value)
        return [
            *entries,
            *([] if replay is None else [(replay, -1.0)]),
            *self.moves_of(value, replayed_from=True),
        ]

    def moves_of(self, value: int, replayed_from: bool = False) -> list[tuple[int, float]]:
        """Entries that are -1 when ``value`` waits elsewhere (so that a replay may read it): none, nothing
        moves here.
        """
        return []

    def _moments(self) -> None:
        """Per value, the events between which a stored copy is surely extra; per event, what is there in any
        case.
        """
        sim = self.sim
        end = sim.end
        self.rests_until = self._surely_held()
        self.span: dict[int, tuple[int, int]] = {}
        fixed = np.zeros(end + 1, dtype=np.int64)
        self.handed: dict[int, list[tuple[int, int]]] = {}
        self.pieces: dict[int, list[tuple[int, int]]] = {}
        by_storage: dict[int, list[tuple[int, int]]] = {}
        for value in self.demanded:
            sid = sim.storage_of[value]
            for tensor in sim.saved_of[value]:
                spans = [(max(start, sim.natural_end[sid]), until) for start, until in sim.unpacks[tensor]]
                by_storage.setdefault(sid, []).extend(s for s in spans if s[0] < s[1])
        for sid, spans in by_storage.items():
            # Several versions of one storage may be handed out at once, and all of them be one block: it
            # counts once.
            by_storage[sid] = _merged(spans)
            for start, stop in by_storage[sid]:
                fixed[start] += sim.graph.storages[sid].bytes
                fixed[stop] -= sim.graph.storages[sid].bytes
        for value in self.values:
            sid = sim.storage_of[value]
            dead = sim.natural_end[sid]
            rests = (self.rests_until[i] for i in self._readers(value))
            until = sim.last_unpack[value] if value in sim.last_unpack else min(rests, default=-1)
            self.handed[value] = by_storage.get(sid, [])
            if sim.graph.values[value].storable and dead < until:
                self.span[value] = (dead, until)
                self.pieces[value] = _outside(self.handed[value], dead, until)
        self.fixed = sim.natural_live + np.cumsum(fixed[:end]) + sim.scratch
        self.standing = self.fixed
        """the same with what else a program is to leave room for"""
        self.moments: list[tuple[int, int]] = []
        """(row, event) of the program's rows of memory"""

    def _readers(self, value: int) -> list[int]:
        return [i for i in self.sim.readers[value] if i in self.op_column]

    def _rests(self) -> None:
        """Where a stored value is held longer when a certain operation is to run again: (value, pieces, such
        operations), a column each.
        """
        self.extras: list[tuple[int, list[tuple[int, int]], list[int]]] = []
        least = (self.sim.plain_peak - self.sim.graph.resident_bytes) / 4000
        for value, (dead, until) in self.span.items():
            if self.sim.value_bytes[value] < least:
                continue
            readers = self._readers(value)
            start = until
            for level in sorted({self.rests_until[i] for i in readers if self.rests_until[i] > until}):
                pieces = _outside(self.handed[value], max(dead, start), level)
                if pieces:
                    self.extras.append((value, pieces, [i for i in readers if self.rests_until[i] >= level]))
                start = level

    def _surely_held(self) -> dict[int, int]:
        """Operation -> the event until which what it reads is held at least, if it runs again.

        An operation runs again because one of its outputs is not stored: a saved one, which then rests on
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

    def base_program(self) -> Program:
        """Columns and rows without memory."""
        program = Program()
        for _ in self.values:
            program.column()
        for i in self.operations:
            program.column(self.seconds_of(i))
        for v in self.demanded:
            replay = self.replay_column(v)
            program.row(
                [(self.column[v], -1.0), *([] if replay is None else [(replay, -1.0)]), *self.moves_of(v)],
                -1.0,
            )
        for i in self.operations:
            for u in self.sim.reads[i]:
                program.row([(self.op_column[i], 1.0), *self.available(u)], 0.0)
        for value, _, readers in self.extras:
            held = program.column()
            for i in readers:
                program.row([(self.column[value], 1.0), (self.op_column[i], 1.0), (held, -1.0)], 1.0)
        return program

    def add_moment(
        self, program: Program, event: int, entries: list[tuple[int, float]], budget: int, scale: float
    ) -> None:
        """The row of what takes memory at an event."""
        self.moments.append((program.row(entries, (budget - float(self.standing[event])) / scale), event))

    def occupancy(self, point: Floats) -> Floats:
        """Bytes of stored values at every event, those handed out left aside (they are in ``fixed``)."""
        change = np.zeros(self.sim.end + 1)
        first = len(self.values) + len(self.operations)
        held = [(value, pieces, point[self.column[value]]) for value, pieces in self.pieces.items()]
        held += [
            (value, pieces, point[first + k])
            for k, (value, pieces, _) in enumerate(self.extras)
            if first + k < len(point)
        ]
        for value, pieces, amount in held:
            if amount > 1e-9:
                size = self.sim.value_bytes[value] * amount
                for a, b in pieces:
                    change[a] += size
                    change[b] -= size
        return np.cumsum(change[:-1])

    @cached_property
    def _spread(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """All pieces: whose they are, and the events between which they last."""
        table = np.array(
            [(value, a, b) for value, pieces in self.pieces.items() for a, b in pieces], dtype=np.int64
        ).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    def held_at(self, event: int, without: set[int] | None = None) -> list[tuple[int, float]]:
        """Entries of the stored values that take memory at ``event``."""
        whose, start, stop = self._spread
        there = dict.fromkeys(whose[(start <= event) & (event < stop)].tolist())
        entries = [
            (self.column[v], float(self.sim.value_bytes[v]))
            for v in there
            if without is None or v not in without
        ]
        first = len(self.values) + len(self.operations)
        for k, (value, pieces, _) in enumerate(self.extras):
            own = without is not None and value in without and value not in self.sim.saved_of
            if not own and any(a <= event < b for a, b in pieces):
                entries.append((first + k, float(self.sim.value_bytes[value])))
        return entries


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of spans."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _outside(handed: list[tuple[int, int]], start: int, until: int) -> list[tuple[int, int]]:
    """The parts of ``start`` to ``until`` that lie outside ``handed``."""
    pieces: list[tuple[int, int]] = []
    for a, b in handed:
        if a > start:
            pieces.append((start, min(a, until)))
        start = max(start, b)
    if start < until:
        pieces.append((start, until))
    return [(a, b) for a, b in pieces if a < b]
