"""A step graph's indices: who makes and reads each value, what happens to it at which event, and live bytes
when everything is evicted. A planner asks for them thousands of times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.graph import Operation, StepGraph
from lowtide.plan.data import Move, module_in_words

Bytes = NDArray[np.int64]

DONE, UNPACKED, UNPACKED_AGAIN, BACKWARD_BEGINS, RELEASED, UNREPLAYED = range(6)
"""What a walk through replays stops at, in the order in which it goes at one event."""


class Held(NamedTuple):
    """Which replayed copies are alive at one moment of a walk, for who wants to show them.

    Attributes:
        event: the moment is within it, or right after it.
        operation: the operation that runs again then, or -1 after the event.
        values: whose copies are alive.
        bytes: of those, and of what is fetched ahead.
        scratch_bytes: of the operation.
    """

    event: int
    operation: int
    values: frozenset[int]
    bytes: int
    scratch_bytes: int


class StepIndex:
    """The indices of one step graph, and which of its values move."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.operations: Sequence[Operation] = graph.operations
        self.moved: dict[int, Move] = {}
        self.window_bytes = 0
        self.slab = False
        self.seen: list[Held] | None = None
        """what the latest walk through replays held at each moment, where somebody wants to know"""
        self.end = len(graph.events)
        """The event index that stands for "never"."""
        self._index_values()
        self._index_events()
        self._natural_timeline()
        self._index_replays()

    def place(self, index: int) -> float:
        """Where an operation stands in the forward; what fetches a value stands right behind what made it."""
        if index < len(self.graph.operations):
            return index
        return (self.graph.values[self.operations[index].writes[0]].producer or 0) + 0.5

    def _index_values(self) -> None:
        graph = self.graph
        storages = graph.storages
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
        self.packed_after = [-1] * len(graph.saved)
        """saved tensor -> the forward operation after which it is packed"""
        self.release_event = [end] * len(graph.saved)
        forward = -1
        self.unpacks: list[list[tuple[int, int]]] = [[] for _ in graph.saved]
        for at, (kind, index) in enumerate(graph.events):
            if kind == "op":
                self.op_event[index] = at
                forward = index if graph.operations[index].phase == "forward" else forward
            elif kind == "free":
                self.free_event[index] = at
            elif kind == "pack":
                self.pack_event[index], self.packed_after[index] = at, forward
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
        for value, tensors in self.saved_of.items():
            late = [t for t in tensors if self.release_event[t] > self.first_unpack and not self.unpacks[t]]
            if late:
                self.unasked[value] = late
        self.own_hold = [
            max([self.release_event[t], *(until for _, until in self.unpacks[t])])
            for t in range(len(graph.saved))
        ]
        of = self.saved_of.items()
        self.saved_release = {v: max(self.release_event[t] for t in tensors) for v, tensors in of}
        """value -> the last release of its droppable saved tensors."""
        self.saved_hold = {v: max(self.own_hold[t] for t in tensors) for v, tensors in of}
        """value -> the last release or done of its droppable saved tensors."""
        self.storage_hold: dict[int, int] = {}
        """storage -> the last release or done of the droppable saved tensors in it."""
        for value, until in self.saved_hold.items():
            storage = self.storage_of[value]
            self.storage_hold[storage] = max(self.storage_hold.get(storage, 0), until)
        self.value_of_saved = [saved.value for saved in graph.saved]
        self.asking = {v: sum(1 for t in tensors if self.unpacks[t]) for v, tensors in of}
        """value -> how many of its droppable saved tensors somebody unpacks."""
        self.last_unpack = {
            v: max(start for t in tensors for start, _ in self.unpacks[t])
            for v, tensors in of
            if self.asking[v]
        }
        """value -> the event at which one of its droppable saved tensors is unpacked last, if any is."""
        self.value_events: dict[int, list[tuple[int, int, int]]] = {}
        """value -> (event, what happens then, saved tensor)"""
        for value, tensors in of:
            firsts = [(t, *self.unpacks[t][0]) for t in tensors if self.unpacks[t]]
            later = [(start, UNPACKED_AGAIN, t) for t in tensors for start, _ in self.unpacks[t][1:]]
            done = [(until, DONE, t) for t, _, until in firsts if until < end]
            self.value_events[value] = [*((start, UNPACKED, t) for t, start, _ in firsts), *later, *done]

    def _natural_timeline(self) -> None:
        """Live bytes when every droppable saved tensor is evicted and nothing is replayed; saved tensors
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

    def _index_replays(self) -> None:
        """What operations read, without parameters and the like, which are always there."""
        graph, base = self.graph, self.base_flags
        self.reads: list[Sequence[int]] = [[u for u in op.reads if not base[u]] for op in graph.operations]
        """operation -> what it reads that may be missing"""
        self.storable = bytearray(v.storable for v in graph.values)
        self.forced = frozenset(tensor.value for tensor in graph.saved if tensor.forced)
        """values that a checkpointing scope asked to be evicted"""

    @cached_property
    def dtypes(self) -> dict[int, str]:
        """Saved value -> name of the type that autograd first saves it as."""
        return {s.value: s.dtype.removeprefix("torch.") for s in reversed(self.graph.saved)}

    @cached_property
    def feasible(self) -> list[bool]:
        """Per operation: whether it can run again when everything that can be stored is stored."""
        found: list[bool] = []
        for op in self.graph.operations:
            made = [self.producer[u] for u in op.reads if not self.storable[u]]
            found.append(op.replayable and all(index >= 0 and found[index] for index in made))
        return found

    @cached_property
    def must(self) -> bytearray:
        """Per value: whether it stays wherever it is needed, for nothing may bring it back."""
        return bytearray(v.producer is None or not self.feasible[v.producer] for v in self.graph.values)

    def describe(self, value: int) -> str:
        """A value in words: what wrote it, and in which module."""
        index = self.producer[value]
        if index < 0:
            return f"storage {self.graph.storages[self.storage_of[value]].name or self.storage_of[value]}"
        op = self.graph.operations[index]
        return f"output of {op.name} (operation {index}, {module_in_words(op.module)})"
