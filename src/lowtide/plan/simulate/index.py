"""A step graph's indices: which operations make and read each value, what happens to each value at which
event, and live bytes when everything is evicted. A planner asks for them thousands of times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import and_, attrgetter, itemgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lowtide.graph import Operation, StepGraph
from lowtide.plan.data import Move, module_in_words
from lowtide.plan.simulate.crossing import crossing

Bytes = NDArray[np.int64]

Happening = tuple[int, str, int]
"""An event, what happens to the copy of an evicted value then, and the value. A saved tensor on the value is
unpacked for the first time (``unpack``) or once more (``again``); what was handed out then is gone (``done``,
``done again``); or a saved tensor that nobody unpacks is released (``gone``).
"""


def bytes_over_time(changes: Iterable[tuple[int, int]], end: int) -> Bytes:
    """The sum of changes of bytes at events, after every event up to ``end``."""
    change = np.zeros(end + 1, dtype=np.int64)
    for event, bytes_ in changes:
        change[event] += bytes_
    return np.cumsum(change[:end])


def replay_set(
    values: Iterable[int],
    producer: Sequence[int],
    reads: Sequence[Sequence[int]],
    there: Sequence[object],
) -> set[int]:
    """The operations that run again to bring ``values`` back; -1 is among them where a value is missing that
    no operation makes.

    Args:
        values: ids of the values.
        producer: value -> the operation that makes it, or -1.
        reads: operation -> the values that it reads.
        there: value -> whether the value is live anyway wherever a replay reads it.

    Example:
        Operation 0 makes value 1 from 0, operation 1 makes 2 from 1.

        >>> sorted(replay_set([2], [-1, 0, 1], [[0], [1]], [True, False, False]))
        [0, 1]
        >>> sorted(replay_set([2], [-1, 0, 1], [[0], [1]], [False, True, False]))
        [1]
    """
    found: set[int] = set()
    stack = list(map(producer.__getitem__, values))
    while stack:
        index = stack.pop()
        if index in found:
            continue
        found.add(index)
        if index >= 0:
            for u in reads[index]:
                if not there[u]:
                    stack.append(producer[u])
    return found


class Moving(Protocol):
    """What values that move add to a step: `lowtide.extensions.moves.simulate` has it.

    Attributes:
        moved: value -> the value's move.
        slab: whether fetched values lie in a slab, and take no memory of their own.
    """

    @property
    def moved(self) -> Mapping[int, Move]: ...
    @property
    def slab(self) -> bool: ...

    def place(self, operation: int) -> float:
        """Where an operation stands in the order of the forward; a fetch has a place among the others."""
        ...

    def walk(
        self,
        sim: Any,
        sources: Sources,
        flags: bytearray,
        running: list[int],
        happenings: list[Happening],
        seen: Any,
    ) -> Any:
        """The `lowtide.plan.simulate.walk.Walk` through the step, fetches included."""
        ...

    def outgoing(self, sim: Any, sources: Sources, until: dict[int, int]) -> Outgoing:
        """What copies out take; ``until`` says of each operation when its result is last asked for."""
        ...


class Outgoing(Protocol):
    """What copies out hold and take.

    Attributes:
        hold: storage -> the event until which a copy out holds it.
        level: (event, bytes) changes of what encoded forms take on the device.
    """

    hold: dict[int, int]
    level: list[tuple[int, int]]

    def scratch(self, plain: Bytes) -> Bytes:
        """The most that is allocated beyond what is live after each event, from that of the plain step."""
        ...

    def transfers(self, walk: Any) -> Transfers:
        """What transfers do to the step, after the walk through it."""
        ...


class Transfers(Protocol):
    """What transfers do to a step.

    Attributes:
        seconds: what they add to it.
        crowding_seconds: what of that they take from the operations that run beside them.
    """

    @property
    def seconds(self) -> float: ...
    @property
    def crowding_seconds(self) -> float: ...


@dataclass(frozen=True, eq=False)
class Sources:
    """Where evicted values come back from: their producers, which run again, or fetches.

    Attributes:
        operations: the step's operations, and behind them the fetch of each value that moves: an operation
            that reads nothing.
        own: how many operations are the step's own.
        producer: value -> the operation that brings the value back, or -1.
        reads: operation -> the values that it reads, but those that are always live (`StepIndex.base_flags`).
        held_reads: operation -> the values that it reads and that user code may have let go of.
        moving: what values that move add, where some do.
    """

    operations: Sequence[Operation]
    own: int
    producer: Sequence[int]
    reads: Sequence[Sequence[int]]
    held_reads: Sequence[Sequence[int]]
    moving: Moving | None = None

    @property
    def moved(self) -> Mapping[int, Move]:
        """Value -> the value's move."""
        return {} if self.moving is None else self.moving.moved

    @property
    def slab(self) -> bool:
        """Whether fetched values lie in a slab, and take no memory of their own."""
        return self.moving is not None and self.moving.slab

    def in_order(self, operations: Iterable[int]) -> list[int]:
        """Operations in the order of the forward."""
        return sorted(operations, key=None if self.moving is None else self.moving.place)


class StepIndex:
    """The indices of one step graph."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.end = len(graph.events)
        """The event index that stands for "never"."""
        self._index_values()
        self._index_events()
        self.sources = Sources(
            graph.operations, len(graph.operations), self.producer, self.reads, self.held_reads
        )
        """where evicted values come back from when none moves"""

    def _index_values(self) -> None:
        graph = self.graph
        self.has_gathered = "gathered" in map(attrgetter("kind"), graph.storages)
        """whether replays may read gathered storages, which are empty for a part of the step"""
        self.value_bytes = [graph.storages[v.storage].bytes for v in graph.values]
        self.producer = [v.producer if v.producer is not None else -1 for v in graph.values]
        self.given = bytes(index < 0 for index in self.producer)
        """value -> whether no operation of the step makes it"""
        self.storage_of = [v.storage for v in graph.values]
        self.storable = bytearray(v.storable for v in graph.values)
        by_version = {(v.storage, v.version): v.id for v in graph.values}
        self.previous = [by_version.get((v.storage, v.version - 1), -1) for v in graph.values]
        self.base_flags = bytearray(v.producer is None and v.storable for v in graph.values)
        """1 for parameters and the like, which are always there"""
        self.reads: list[Sequence[int]] = [
            [u for u in op.reads if not self.base_flags[u]] for op in graph.operations
        ]
        """operation -> the values that it reads, but those that are always live"""
        self.readers: list[list[int]] = [[] for _ in graph.values]
        for op in graph.operations:
            for value in op.reads if op.phase == "forward" else ():
                self.readers[value].append(op.index)
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
        self.packed_after = [-1] * len(graph.saved)
        """saved tensor -> the forward operation after which it is packed"""
        self.unpacks: list[list[tuple[int, int]]] = [[] for _ in graph.saved]
        self.resizes: dict[int, list[tuple[int, bool]]] = {}
        """storage -> the events at which user code empties or fills it, in order"""
        pack, release, forward = [0] * len(graph.saved), [end] * len(graph.saved), -1
        for at, (kind, index) in enumerate(graph.events):
            if kind == "op":
                self.op_event[index] = at
                forward = index if graph.operations[index].phase == "forward" else forward
            elif kind == "free":
                self.free_event[index] = at
            elif kind in ("empty", "fill"):
                self.resizes.setdefault(index, []).append((at, kind == "fill"))
            elif kind == "pack":
                pack[index], self.packed_after[index] = at, forward
            elif kind == "release":
                release[index] = at
            elif kind == "unpack":
                self.unpacks[index].append((at, end))
            elif kind == "done":
                spans = self.unpacks[index]
                k = next((k for k, (_, until) in enumerate(spans) if until == end), None)
                if k is not None:
                    spans[k] = (spans[k][0], at)
        self.begin_empty = graph.begin_empty
        """storages that exist before the step without bytes"""
        last = max((pack[s.id] for s in graph.saved if s.droppable), default=-1)
        self.first_unpack = min(
            (u[0][0] for t, u in enumerate(self.unpacks) if u and pack[t] <= last), default=end
        )
        """the event at which backward asks for the first tensor that an executor has packed"""
        hold = [max(release[t], *(until for _, until in [*u, (0, 0)])) for t, u in enumerate(self.unpacks)]
        self._index_saved(release, hold)
        self._natural_timeline(hold)

    def _index_saved(self, release: list[int], hold: list[int]) -> None:
        """What happens to the droppable saved tensors of each value: ``release`` and ``hold`` are the events
        of each tensor's release and of its last ``done``, or that if it is later.
        """
        self.saved_release: dict[int, int] = {}
        """value -> the last release of its droppable saved tensors"""
        self.saved_hold: dict[int, int] = {}
        """value -> the last release or done of its droppable saved tensors"""
        self.storage_hold: dict[int, int] = {}
        """storage -> the last release or done of the droppable saved tensors in it"""
        self.last_unpack: dict[int, int] = {}
        """value -> the event at which one of its droppable saved tensors is unpacked last, if any is"""
        self.happenings: dict[int, list[Happening]] = {}
        """value -> what happens to its copy, where it is unpacked"""
        self.unasked: list[Happening] = []
        """the releases (``gone``) of saved tensors that nobody unpacks, of those after `first_unpack`"""
        for v, tensors in self.saved_of.items():
            self.saved_release[v] = max(release[t] for t in tensors)
            self.saved_hold[v] = max(hold[t] for t in tensors)
            storage = self.storage_of[v]
            self.storage_hold[storage] = max(self.storage_hold.get(storage, 0), self.saved_hold[v])
            asked = [self.unpacks[t] for t in tensors if self.unpacks[t]]
            late = [release[t] for t in tensors if not self.unpacks[t] and release[t] > self.first_unpack]
            self.unasked += [(at, "gone", v) for at in late]
            if asked:
                self.last_unpack[v] = max(start for spans in asked for start, _ in spans)
            self.happenings[v] = [
                *((spans[0][0], "unpack", v) for spans in asked),
                *((start, "again", v) for spans in asked for start, _ in spans[1:]),
                *((spans[0][1], "done", v) for spans in asked if spans[0][1] < self.end),
                *((done, "done again", v) for spans in asked for _, done in spans[1:] if done < self.end),
            ]

    def _natural_timeline(self, hold: list[int]) -> None:
        """Live bytes when every droppable saved tensor is evicted and nothing is replayed; saved tensors
        that stay are counted.
        """
        graph, end = self.graph, self.end
        self.natural_end = list(self.free_event)
        """storage -> the event after which nothing holds it but droppable saved tensors"""
        for storage in graph.storages:
            if storage.producer is None and storage.kind != "input":
                self.natural_end[storage.id] = end
        for saved in graph.saved:
            if not saved.droppable:
                sid = self.storage_of[saved.value]
                self.natural_end[sid] = max(self.natural_end[sid], hold[saved.id])
        self.held_reads: list[Sequence[int]] = [
            [u for u in op.reads if not self.base_flags[u] or self.natural_end[self.storage_of[u]] < end]
            for op in graph.operations
        ]
        """operation -> the values that it reads and that user code may have let go of"""
        made = [s for s in graph.storages if s.producer is not None]
        gone = [s for s in graph.storages if s.producer is not None or s.kind == "input"]
        changes = [(self.op_event[s.producer or 0], s.bytes) for s in made]
        changes += [(self.natural_end[s.id], -s.bytes) for s in gone]
        for sid, resizes in self.resizes.items():
            there, size, until = sid not in self.begin_empty, graph.storages[sid].bytes, self.natural_end[sid]
            for at, filled in resizes:
                if at < until and filled is not there:
                    changes.append((at, size if filled else -size))
                    there = filled
            changes += [(until, size)] * (not there)
        self.natural_live = graph.resident_bytes + bytes_over_time(changes, end)
        self.scratch = np.zeros(end, dtype=np.int64)
        for op in graph.operations:
            if self.op_event[op.index] < end:
                self.scratch[self.op_event[op.index]] = op.scratch_bytes

    @cached_property
    def stored_by_scopes(self) -> frozenset[int]:
        """Values that checkpointing scopes hold by themselves: they enter a region, and are saved there, or
        read by operations that run again there.
        """
        operations, values = self.graph.operations, self.graph.values
        kept = {tensor.value for tensor in self.graph.saved if not tensor.forced}
        stack = [values[tensor.value].producer for tensor in self.graph.saved if tensor.forced]
        found = set[int | None]()
        while stack:
            index = stack.pop()
            if index is None or index in found:
                continue
            found.add(index)
            for value in operations[index].reads:
                made = values[value].producer
                if made is not None and operations[made].region == operations[index].region:
                    stack.append(made)
                else:
                    kept.add(value)
        return frozenset(kept)

    @cached_property
    def evicted_by_scopes(self) -> frozenset[int]:
        """Values that checkpointing scopes evict by themselves, where they can come back: a region makes them
        and no other region holds them. No plan keeps one.
        """
        if not self.graph.has_scopes:
            return frozenset()
        made = {w for op in self.graph.operations if op.region is not None for w in op.writes}
        made |= {tensor.value for tensor in self.graph.saved if tensor.forced}
        return frozenset(v for v in made if v not in self.stored_by_scopes and not self.must[v])

    @cached_property
    def all_stored(self) -> frozenset[int]:
        """The values that are stored where memory does not matter: all that a plan decides about, and those
        that enter scopes. `Simulator.close` takes away those that scopes evict and those that nobody reads.
        """
        return frozenset(self.droppable).union(self.stored_by_scopes if self.graph.has_scopes else ())

    @cached_property
    def dtypes(self) -> dict[int, str]:
        """Saved value -> name of the type that autograd first saves it as."""
        return {s.value: s.dtype.removeprefix("torch.") for s in reversed(self.graph.saved)}

    @cached_property
    def feasible(self) -> list[bool]:
        """Per operation: whether it can run again when everything that can be stored is stored."""
        found: list[bool] = []
        for op in self.graph.operations:
            again = op.replayable
            for u in op.reads:
                again = again and (self.storable[u] or (self.producer[u] >= 0 and found[self.producer[u]]))
            found.append(bool(again))
        return found

    @cached_property
    def must(self) -> bytearray:
        """Per value: whether it stays wherever it is needed, since no operation may bring it back, or one
        would read a gathered storage then while that is empty.
        """
        found = bytearray(v.producer is None or not self.feasible[v.producer] for v in self.graph.values)
        if self.has_gathered:
            sizes, storable = self.value_bytes, self.storable
            # of a value that nobody unpacks (-1) it counts only whether its replay has what to begin from
            asked = [
                *self.unpacks_of(self.droppable),
                *((v, -1) for v in self.droppable if v not in self.last_unpack),
            ]
            crossing(asked, self.present, found, self.producer, self.reads, storable, sizes)
        return found

    @cached_property
    def latest_fill(self) -> list[int]:
        """Event -> the latest event up to it that filled or emptied a gathered storage, else 0."""
        kinds, found, latest = [s.kind for s in self.graph.storages], list[int](), 0
        for at, (kind, index) in enumerate(self.graph.events):
            latest = at if kind in ("empty", "fill") and kinds[index] == "gathered" else latest
            found.append(latest)
        return found

    def present(self, operation: int, event: int) -> bool:
        """Whether every gathered storage that an operation reads is filled at an event, so that it may run
        again there; a negative one stands for never.
        """
        return event < 0 or all(self._is_filled(sid, event) for sid in self.gathered_reads[operation])

    @cached_property
    def gathered_reads(self) -> list[tuple[int, ...]]:
        """Operation -> the gathered storages that the operation reads."""
        kinds, storage_of = [s.kind for s in self.graph.storages], self.storage_of
        return [
            tuple({storage_of[u] for u in op.reads if kinds[storage_of[u]] == "gathered"})
            for op in self.graph.operations
        ]

    def _is_filled(self, sid: int, event: int) -> bool:
        resizes = self.resizes.get(sid, [])
        place = bisect_right(resizes, event, key=itemgetter(0))
        return resizes[place - 1][1] if place else sid not in self.begin_empty

    def unpacks_of(self, evicted: Iterable[int]) -> Iterator[tuple[int, int]]:
        """(value, event) for each time that a replay brings an evicted value back."""
        for v in evicted:
            unpacked = [at for at, what, _ in self.happenings[v] if what == "unpack"]
            yield from ((v, at) for at in sorted(unpacked)[:1])
            yield from ((v, at) for at, what, _ in self.happenings[v] if what == "again")

    @cached_property
    def must_storable(self) -> bytes:
        """Per value: whether it stays wherever it is needed, and replays may start from it."""
        return bytes(map(and_, self.storable, self.must))

    @cached_property
    def must_droppable(self) -> frozenset[int]:
        """The saved values that no plan evicts."""
        return frozenset(filter(self.must.__getitem__, self.droppable))

    @cached_property
    def unreplayable(self) -> frozenset[int]:
        """The operations that cannot run again, and -1, which stands for none."""
        return frozenset({-1, *(op.index for op in self.graph.operations if not op.replayable)})

    def describe(self, value: int) -> str:
        """A value in words: what wrote it, and in which module."""
        index = self.producer[value]
        if index < 0:
            return f"storage {self.graph.storages[self.storage_of[value]].name or self.storage_of[value]}"
        op = self.graph.operations[index]
        return f"output of {op.name} (operation {index}, {module_in_words(op.module)})"
