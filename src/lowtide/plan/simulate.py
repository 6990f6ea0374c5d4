"""The exact memory and time of a step under a set of stored values, by walking the step graph's events.

In: a `StepGraph` and the ids of the values that are stored. Out: a `Simulation`: live bytes at every event,
their peak and where it stands, the operations that run again, and their seconds. The rules are those of
docs/design.md ("What the executor does with a plan"), so what is predicted here is what the meter reads
there. A `Simulator` holds the graph's indices, because a planner asks thousands of times.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import PlanError
from lowtide.graph import Operation, StepGraph
from lowtide.plan.reach import Reach, refuse
from lowtide.plan.replay import Replay, Walk
from lowtide.plan.traffic import Links, Moved, Outgoing, Traffic, fetch_operations

Bytes = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a step does under one set of stored values.

    Attributes:
        stored: the stored values that were asked for.
        replayed: indices of the operations that run again in backward (the set N of docs/design.md), in
            forward order.
        given_up: ids of the saved values that are given up.
        peak_bytes: the most live bytes at any moment, within operations and replays too.
        peak_event: index of the event at which the peak stands.
        peak_operation: the operation that runs then (a replayed one when ``peak_in_replay``), or ``None`` in
            a step without operations.
        peak_in_replay: whether the peak stands within a replay.
        extra_seconds: what the plan adds to the step.
        live_bytes: live bytes after every event.
        top_bytes: the most live bytes at any moment of every event.
        held_until: storage id -> event after which a plan lets a storage go that would naturally have died
            earlier.
        traffic: what transfers do, where values move.
        spans: (moved value, whether it is the encoded form on its way in) -> half-open lifetime in turns of
            the backward, where a slab holds them.
        turns: turn -> the event that it is part of.
    """

    stored: frozenset[int]
    replayed: tuple[int, ...]
    given_up: tuple[int, ...]
    peak_bytes: int
    peak_event: int
    peak_operation: Operation | None
    peak_in_replay: bool
    extra_seconds: float
    live_bytes: Bytes = field(repr=False)
    top_bytes: Bytes = field(repr=False)
    held_until: dict[int, int] = field(repr=False)
    traffic: Traffic | None = field(default=None, repr=False)
    spans: dict[tuple[int, bool], tuple[int, int]] = field(default_factory=dict, repr=False)
    turns: list[int] = field(default_factory=list, repr=False)

    @property
    def peak_module(self) -> str:
        """Qualified name of the module in which the peak stands."""
        return self.peak_operation.module if self.peak_operation else ""


class Simulator:
    """Simulates one step graph under many sets of stored values."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.operations: Sequence[Operation] = graph.operations
        self.moved: dict[int, Moved] = {}
        self.window_bytes = 0
        self.slab = False
        self.feasible: list[bool] = []
        """what `lowtide.plan.build.feasible_replays` has found"""
        self.end = len(graph.events)
        """The event index that stands for "never"."""
        self._index_values()
        self._index_events()
        self._natural_timeline()
        self.reach = Reach(self)
        self.plain_live, self.plain_peak = self._plain()

    def moving(self, moved: Sequence[Moved], window_bytes: int, slab: bool = False) -> Simulator:
        """This simulator when some values move: to everything that rests on such a value, an operation that
        reads nothing brings it back.

        With ``slab`` what comes back takes no memory of its own, and `Simulation.spans` says when it would.
        """
        twin = copy.copy(self)
        twin.slab = slab
        fetches = fetch_operations(self.graph, moved, slab)
        twin.operations = [*self.graph.operations, *fetches]
        twin.producer = list(self.producer)
        for fetch in fetches:
            twin.producer[fetch.writes[0]] = fetch.index
        twin.reach = self.reach.fetching(fetches, twin.producer)
        twin.moved = {m.value: m for m in moved}
        twin.window_bytes = window_bytes
        return twin

    def place(self, index: int) -> float:
        """Where an operation stands in the forward; what fetches a value stands right behind what made it."""
        if index < len(self.graph.operations):
            return index
        return (self.graph.values[self.operations[index].writes[0]].producer or 0) + 0.5

    def _index_values(self) -> None:
        graph = self.graph
        storages = graph.storages
        self.storage_bytes = {s.id: s.bytes for s in storages}
        self.value_bytes = [storages[v.storage].bytes for v in graph.values]
        self.producer = [v.producer if v.producer is not None else -1 for v in graph.values]
        self.storage_of = [v.storage for v in graph.values]
        by_version = {(v.storage, v.version): v.id for v in graph.values}
        self.previous = [by_version.get((v.storage, v.version - 1), -1) for v in graph.values]
        self.readers: list[list[int]] = [[] for _ in graph.values]
        for op in graph.operations:
            if op.phase == "forward":
                for value in op.reads:
                    self.readers[value].append(op.index)
        self.base_flags = bytearray(len(graph.values))
        for value in graph.values:
            if value.producer is None and value.storable:
                self.base_flags[value.id] = 1
        self.saved_of: dict[int, list[int]] = {}
        """value -> its droppable saved tensors."""
        for saved in graph.saved:
            if saved.droppable:
                self.saved_of.setdefault(saved.value, []).append(saved.id)
        self.droppable = [v for v in self.saved_of if self.producer[v] >= 0]
        """the values that a plan decides about."""
        last = {v.storage: v.id for v in graph.values if v.storable}
        self.companions: dict[int, list[int]] = {}
        """value -> saved earlier versions of its storage, which cost nothing to keep while it is stored."""
        for v in self.droppable:
            if not graph.values[v].storable and self.storage_of[v] in last:
                self.companions.setdefault(last[self.storage_of[v]], []).append(v)

    def _index_events(self) -> None:
        graph, end = self.graph, self.end
        self.op_event = [end] * len(graph.operations)
        self.free_event = [end] * len(graph.storages)
        self.pack_event = [0] * len(graph.saved)
        self.release_event = [end] * len(graph.saved)
        self.unpacks: list[list[tuple[int, int]]] = [[] for _ in graph.saved]
        for at, (kind, index) in enumerate(graph.events):
            if kind == "op":
                self.op_event[index] = at
            elif kind == "free":
                self.free_event[index] = at
            elif kind == "pack":
                self.pack_event[index] = at
            elif kind == "release":
                self.release_event[index] = at
            elif kind == "unpack":
                self.unpacks[index].append((at, end))
            elif kind == "done":
                for k, (start, until) in enumerate(self.unpacks[index]):
                    if until == end:
                        self.unpacks[index][k] = (start, at)
                        break
        last = max((self.pack_event[s.id] for s in graph.saved if s.droppable), default=-1)
        inside = [
            self.unpacks[s.id][0][0]
            for s in graph.saved
            if self.unpacks[s.id] and self.pack_event[s.id] <= last
        ]
        self.first_unpack = min(inside, default=end)
        """the event at which backward asks for the first tensor that an executor has packed"""
        self.unasked: dict[int, list[int]] = {}
        """value -> its droppable saved tensors that are released while backward runs, or later, and that
        nobody unpacks.
        """
        for saved in graph.saved:
            if (
                saved.droppable
                and not self.unpacks[saved.id]
                and self.release_event[saved.id] > self.first_unpack
            ):
                self.unasked.setdefault(saved.value, []).append(saved.id)
        self.own_hold = [
            max([self.release_event[t], *(until for _, until in self.unpacks[t])])
            for t in range(len(graph.saved))
        ]
        self.saved_release: dict[int, int] = {}
        """value -> the last release of its droppable saved tensors."""
        self.saved_hold: dict[int, int] = {}
        """value -> the last release or done of its droppable saved tensors."""
        self.unpacked: dict[int, bool] = {}
        """value -> whether anybody unpacks one of its droppable saved tensors."""
        self.value_of_saved = [saved.value for saved in graph.saved]
        self.asking: dict[int, int] = {}
        """value -> how many of its droppable saved tensors somebody unpacks."""
        self.value_events: dict[int, list[tuple[int, int, int]]] = {}
        """value -> (event, kind, saved tensor): kind 0 for done, 1 for the first unpack, 2 for a later
        one.
        """
        for value, tensors in self.saved_of.items():
            self.saved_release[value] = max(self.release_event[t] for t in tensors)
            self.saved_hold[value] = max(self.own_hold[t] for t in tensors)
            self.asking[value] = sum(1 for t in tensors if self.unpacks[t])
            self.unpacked[value] = self.asking[value] > 0
            events: list[tuple[int, int, int]] = []
            for t in tensors:
                for k, (start, until) in enumerate(self.unpacks[t]):
                    events.append((start, 2 if k else 1, t))
                    if until < end and not k:
                        events.append((until, 0, t))
            self.value_events[value] = events

    def _natural_timeline(self) -> None:
        """Live bytes when every droppable saved tensor is given up and nothing is replayed; saved tensors
        that stay are counted.
        """
        graph, end = self.graph, self.end
        self.natural_end = list(self.free_event)
        for storage in graph.storages:
            if storage.producer is None and storage.kind != "input":
                self.natural_end[storage.id] = end
        for saved in graph.saved:
            if not saved.droppable:
                sid = self.storage_of[saved.value]
                self.natural_end[sid] = max(self.natural_end[sid], self.own_hold[saved.id])
        change = np.zeros(end + 1, dtype=np.int64)
        for storage in graph.storages:
            if storage.producer is not None:
                change[self.op_event[storage.producer]] += storage.bytes
            if self.natural_end[storage.id] < end and (
                storage.producer is not None or storage.kind == "input"
            ):
                change[self.natural_end[storage.id]] -= storage.bytes
        self.natural_change = change
        self.scratch = np.zeros(end, dtype=np.int64)
        for op in graph.operations:
            if self.op_event[op.index] < end:
                self.scratch[self.op_event[op.index]] = op.scratch_bytes
        self.natural_live: Bytes = graph.resident_bytes + np.cumsum(change[:end])

    def _plain(self) -> tuple[Bytes, int]:
        hold: dict[int, int] = {}
        for value, until in self.saved_hold.items():
            sid = self.storage_of[value]
            hold[sid] = max(hold.get(sid, 0), until)
        live = self._live(hold)
        top = live + self.scratch
        return live, int(top.max(initial=self.graph.resident_bytes))

    def _live(self, hold: dict[int, int]) -> Bytes:
        """Live bytes after every event when each storage is held until ``hold[storage]``."""
        change = self.natural_change.copy()
        storages, natural_end, end = self.graph.storages, self.natural_end, self.end
        at: list[int] = []
        by: list[int] = []
        for sid, until in hold.items():
            start = natural_end[sid]
            if start < until and start < end:
                size = storages[sid].bytes
                at += (start, until)
                by += (size, -size)
        if at:
            np.add.at(change, at, by)
        return self.graph.resident_bytes + np.cumsum(change[: self.end])

    def flags(self, stored: Iterable[int]) -> bytearray:
        """One byte a value: 1 where it is stored or stood before the step, 2 where it is kept for backward as
        PyTorch would keep it but no replay may start from it.

        Raises:
            PlanError: a value cannot be stored.
        """
        flags = bytearray(self.base_flags)
        storable = self.reach.storable
        for value in stored:
            if storable[value]:
                flags[value] = 1
            elif value in self.saved_of:
                flags[value] = 2
            else:
                raise PlanError(
                    f"value {value} cannot be stored: {self.describe(value)} is overwritten or resized later "
                    "in the step"
                )
        return flags

    def describe(self, value: int) -> str:
        """A value in words: what wrote it, and in which module."""
        index = self.producer[value]
        if index < 0:
            return f"storage {self.graph.storages[self.storage_of[value]].name or self.storage_of[value]}"
        op = self.graph.operations[index]
        return f"output of {op.name} (operation {index}, module {op.module or 'root'!r})"

    def closure(self, given: list[int], flags: bytearray) -> list[int]:
        """The operations that bring ``given`` back from what ``flags`` says is stored, in their order.

        Raises:
            PlanError: one of them is not replayable, or rests on a value that is not there.
        """
        needed = self.reach.closure(given, flags)
        return refuse(self, given, flags) if needed is None else needed

    def simulate(self, stored: Collection[int], links: Links | None = None) -> Simulation:
        """The step under ``stored`` (rules 1 to 7 of docs/design.md; for values that move, see
        docs/stores.md).

        Raises:
            PlanError: a value in ``stored`` cannot be stored, or what is given up cannot be brought back.
        """
        graph = self.graph
        flags = self.flags(stored)
        given = [v for v in self.droppable if not flags[v]]
        replay = self.replay(given, flags)
        hold: dict[int, int] = {}
        for value, until in self.saved_hold.items():
            if flags[value]:
                sid = self.storage_of[value]
                if until > hold.get(sid, -1):
                    hold[sid] = until
        for value, until in replay.hold.items():
            sid = self.storage_of[value]
            if until > hold.get(sid, -1):
                hold[sid] = until
        outgoing = Outgoing(self, replay.until) if self.moved else None
        if outgoing is not None:
            for sid, until in outgoing.hold.items():
                hold[sid] = max(hold.get(sid, -1), until)
        live = self._live(hold)
        scratch = self.scratch
        if outgoing is not None:
            live = live + outgoing.encoded_live(self.end)
            scratch = outgoing.scratch(self.scratch)
        if replay.level:
            change = np.zeros(self.end + 1, dtype=np.int64)
            np.add.at(change, [e for e, _ in replay.level], [b for _, b in replay.level])
            copies = np.cumsum(change[: self.end])
            top = live + copies + scratch
            for event, bytes_, _ in replay.tops:
                top[event] = max(top[event], live[event] + bytes_)
            live = live + copies
        else:
            top = live + scratch
        event, peak = -1, graph.resident_bytes
        if self.end:
            at = int(np.argmax(top))
            if top[at] >= peak:
                event, peak = at, int(top[at])
        operation, in_replay = self._standing(event, peak - int(live[event]) if event >= 0 else 0, replay)
        extra = sum(
            self.operations[i].seconds + graph.replay_overhead_seconds
            for i in [*replay.running, *replay.repeats]
        )
        traffic = outgoing.traffic(replay, links) if outgoing is not None else None
        if traffic is not None:
            extra += traffic.seconds
        if given:
            extra += graph.overhead_seconds
        return Simulation(
            stored=frozenset(stored),
            replayed=tuple(i for i in replay.running if i < len(graph.operations)),
            given_up=tuple(v for v in given if v not in self.moved),
            peak_bytes=peak,
            peak_event=event,
            peak_operation=operation,
            peak_in_replay=in_replay,
            extra_seconds=extra,
            live_bytes=live,
            top_bytes=top,
            held_until={sid: until for sid, until in hold.items() if until > self.natural_end[sid]},
            traffic=traffic,
            spans=replay.spans,
            turns=replay.turns,
        )

    def least_at(self, stored: Collection[int], event: int) -> int:
        """No more than `simulate` finds at its most within ``event``: what replays bring back is left out, so
        there is nothing to walk through.
        """
        flags = self.flags(stored)
        given = [v for v in self.droppable if not flags[v]]
        hold: dict[int, int] = {}
        for value, until in self.saved_hold.items():
            if flags[value] and until > event:
                hold[self.storage_of[value]] = until
        rests, _ = self._rests(self.closure(given, flags), given, flags) if given else ({}, {})
        for value, until in rests.items():
            if until > event:
                hold[self.storage_of[value]] = until
        held = sum(self.graph.storages[sid].bytes for sid in hold if self.natural_end[sid] <= event)
        return int(self.natural_live[event] + self.scratch[event]) + held

    def _standing(self, event: int, above: int, replay: Replay) -> tuple[Operation | None, bool]:
        """The operation that runs at ``event``, and whether it is a replay."""
        graph = self.graph
        if event < 0:
            return (graph.operations[0] if graph.operations else None), False
        here = [(bytes_, op) for e, bytes_, op in replay.tops if e == event]
        if here and above > 0:
            return self.operations[max(here)[1]], True
        while event >= 0:
            kind, index = graph.events[event]
            if kind == "op":
                return graph.operations[index], False
            event -= 1
        return (graph.operations[0] if graph.operations else None), False

    def replay(self, given: list[int], flags: bytearray) -> Replay:
        """What giving up ``given`` does, when ``flags`` says what is stored."""
        if not given:
            return Replay([], [], [], {}, [], [], {}, [], [], {}, [-1])
        every = self.closure(given, flags)
        unpacked = [v for v in given if self.unpacked[v]]
        running = every if len(unpacked) == len(given) else self.closure(unpacked, flags)
        order = sorted(every, key=self.place) if self.moved else every
        hold, until = self._rests(order, given, flags)
        idle = (
            {i: until[i] for i in set(every).difference(running) if until[i] > self.first_unpack}
            if running is not every
            else {}
        )
        unasked = [t for v in given for t in self.unasked.get(v, ())] if self.unasked else []
        walk = Walk(self, flags, running, idle)
        walk.run(unpacked, unasked)
        if walk.fetched and self.window_bytes:  # who comes first is known now: once more, with fetching ahead
            ahead = walk.fetched
            walk = Walk(self, flags, running, idle, ahead)
            walk.run(unpacked, unasked)
        return Replay(
            order,
            order if running is every else sorted(running, key=self.place) if self.moved else running,
            walk.repeats,
            hold,
            walk.level,
            walk.tops,
            until,
            walk.fetched,
            walk.work,
            walk.spans(),
            walk.turns,
        )

    def _rests(
        self, order: list[int], given: list[int], flags: bytearray
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Rule 3: stored value -> the last release of a given-up saved tensor whose replay reads it; the same
        for replayed operations.
        """
        producer, release = self.producer, self.saved_release
        until: dict[int, int] = {}
        for value in given:
            index = producer[value]
            if release[value] > until.get(index, -1):
                until[index] = release[value]
        return self.reach.rests(order, until, flags), until


def simulate(graph: StepGraph, stored: Collection[int]) -> Simulation:
    """The step of ``graph`` when the values ``stored`` stay and every other droppable saved value is given
    up.

    Raises:
        PlanError: a value in ``stored`` cannot be stored, or what is given up cannot be brought back.
    """
    return Simulator(graph).simulate(stored)


def plain(graph: StepGraph) -> Simulation:
    """The step of ``graph`` with everything kept, as PyTorch runs it."""
    simulator = Simulator(graph)
    return simulator.simulate(simulator.droppable)
