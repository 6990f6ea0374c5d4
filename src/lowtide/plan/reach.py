"""What brings given-up values back, and what that rests on: the part of a simulation that grows with the
number of operations.

A `Reach` has what one step's operations read in the form in which a planner asks for it thousands of times:
without parameters and the like, which are always there, and without a look at the graph's own objects.
`reach.cpp` is the same compiled, for long lists; without a C++ compiler all is done here.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import PlanError
from lowtide.plan.closure import replay_set

if TYPE_CHECKING:
    from lowtide.graph import Operation
    from lowtide.plan.simulate import Simulator


_WORTH_A_CALL = 96
"""How long a list has to be for a compiled sweep over all operations to take less time than one in Python
over those that matter.
"""


class Reach:
    """What the operations of a step read.

    Attributes:
        reads: operation -> what it reads that may be missing.
        lasting: operation -> what it reads that does not outlive the step by itself.
        refused: whether an operation may not run again.
        must_store: whether a replay may not reach beyond a value.
        storable: whether a value can be stored.
        forced: values that a checkpointing scope asked to be given up.
        must: what `lowtide.plan.build.close` has found.
        producer: value -> what brings it back, -1 for what stood before the step.
    """

    def __init__(self, sim: Simulator) -> None:
        base, end, never = sim.base_flags, sim.natural_end, sim.end
        storage_of, operations = sim.storage_of, sim.operations
        self.reads: list[Sequence[int]] = []
        self.lasting: list[Sequence[int]] = []
        for op in operations:
            reads = op.reads
            self.reads.append(reads if not any(base[u] for u in reads) else [u for u in reads if not base[u]])
            self.lasting.append(
                [u for u in reads if not base[u] or end[storage_of[u]] < never]
                if len(self.reads[-1]) < len(reads)
                else reads
            )
        self.refused = bytearray(not op.replayable for op in operations)
        self.must_store = bytearray(v.must_store for v in sim.graph.values)
        self.storable = bytearray(v.storable for v in sim.graph.values)
        self.forced = frozenset(tensor.value for tensor in sim.graph.saved if tensor.forced)
        self.must = bytearray()
        self.producer = sim.producer

    def fetching(self, fetches: Sequence[Operation], producer: list[int]) -> Reach:
        """The same with operations that read nothing, where ``producer`` says what brings a value back."""
        twin = copy.copy(self)
        twin.__dict__.pop("_compiled", None)
        none: list[Sequence[int]] = [() for _ in fetches]
        twin.reads, twin.lasting = [*self.reads, *none], [*self.lasting, *none]
        twin.refused = self.refused + bytearray(not op.replayable for op in fetches)
        twin.producer = producer
        return twin

    @cached_property
    def _compiled(self) -> _Compiled | None:
        """The same tables for the compiled sweeps, where there is a compiler."""
        return None if _library() is None else _Compiled(self)

    def _sweeps(self, length: int) -> _Compiled | None:
        """The compiled sweeps where ``length`` is worth a call."""
        return self._compiled if length >= _WORTH_A_CALL else None

    def closure(self, given: list[int], flags: bytearray) -> list[int] | None:
        """The operations that bring ``given`` back from what ``flags`` says is stored, in their order;
        ``None`` where that is not possible.
        """
        sweeps = self._sweeps(len(given))
        if sweeps is not None:
            return sweeps.closure(given, flags)
        needed = replay_set(given, self.producer, self.reads, flags.__getitem__)
        if -1 in needed or any(self.refused[index] for index in needed):
            return None
        for index in needed:
            for u in self.reads[index]:
                if flags[u] == 2 or (not flags[u] and self.must_store[u]):
                    return None
        return sorted(needed)

    def rests(self, order: list[int], until: dict[int, int], flags: bytearray) -> dict[int, int]:
        """Rule 3: stored value -> the last release of a given-up saved tensor whose replay reads it, as far
        as that matters. ``until`` says it for the operations that make these, and in the end for all those in
        ``order``, which is that of the forward."""
        sweeps = self._sweeps(len(order))
        if sweeps is not None:
            return sweeps.rests(order, until, flags)
        lasting, producer = self.lasting, self.producer
        hold: dict[int, int] = {}
        held, known = hold.get, until.get
        for index in reversed(order):
            last = until[index]
            for u in lasting[index]:
                if flags[u]:
                    if last > held(u, -1):
                        hold[u] = last
                else:
                    p = producer[u]
                    if last > known(p, -1):
                        until[p] = last
        return hold

    def close(self, kept: set[int], used: set[int], given: list[int], must: bytearray) -> set[int]:
        """``used``, some of ``kept``, and what else the operations need that bring ``given`` back: what of
        ``kept`` they read, and what is a ``must``.
        """
        sweeps = self._sweeps(len(given))
        if sweeps is not None:
            return sweeps.close(kept, used, given, must)
        storable = self.storable
        needed = replay_set(
            given, self.producer, self.reads, lambda u: storable[u] and (u in kept or must[u])
        )
        read = {u for index in needed if index >= 0 for u in self.reads[index]}
        # A kept version that the step overwrites serves backward alone: what a replay reads of it has to be
        # replayed, too.
        return {u for u in used if storable[u] or u not in read} | {
            u for u in read if storable[u] and (u in kept or must[u])
        }


class _Compiled:
    """The sweeps of a `Reach` in `reach.cpp`."""

    def __init__(self, reach: Reach) -> None:
        self.count = len(reach.reads)
        self.values = len(reach.producer)
        self.producer = np.array(reach.producer, dtype=np.int32)
        self.reads = _flat(reach.reads)
        self.lasting = _flat(reach.lasting)
        self.refused = np.frombuffer(reach.refused, dtype=np.uint8)
        self.must_store = np.frombuffer(reach.must_store, dtype=np.uint8)
        self.storable = np.frombuffer(reach.storable, dtype=np.uint8)

    def closure(self, given: list[int], flags: bytearray) -> list[int] | None:
        """As `Reach.closure`."""
        order = np.empty(self.count, dtype=np.int32)
        arrays = [
            *self.reads,
            self.producer,
            self.refused,
            self.must_store,
            np.frombuffer(flags, dtype=np.uint8),
        ]
        asked = np.array(given, dtype=np.int32)
        found = _call(
            "closure", self.count, *map(_address, arrays), len(asked), _address(asked), _address(order)
        )
        return None if found < 0 else order[:found].tolist()

    def rests(self, order: list[int], until: dict[int, int], flags: bytearray) -> dict[int, int]:
        """As `Reach.rests`."""
        ordered = np.array(order, dtype=np.int32)
        last = np.full(self.count, -1, dtype=np.int64)
        last[list(until)] = list(until.values())
        hold = np.full(self.values, -1, dtype=np.int64)
        arrays = [*self.lasting, self.producer, np.frombuffer(flags, dtype=np.uint8)]
        _call(
            "rests", *map(_address, arrays), len(ordered), _address(ordered), _address(last), _address(hold)
        )
        until.update(zip(order, last[ordered].tolist(), strict=True))
        held = np.flatnonzero(hold >= 0)
        return dict(zip(held.tolist(), hold[held].tolist(), strict=True))

    def close(self, kept: set[int], used: set[int], given: list[int], must: bytearray) -> set[int]:
        """As `Reach.close`."""
        stays, found = np.zeros(self.values, dtype=np.uint8), np.zeros(self.values, dtype=np.uint8)
        stays[list(kept)] = 1
        found[list(used)] = 1
        asked = np.array(given, dtype=np.int32)
        arrays = [*self.reads, self.producer, self.storable, np.frombuffer(must, dtype=np.uint8), stays]
        _call("close", self.count, *map(_address, arrays), len(asked), _address(asked), _address(found))
        return set(np.flatnonzero(found).tolist())


def _flat(rows: list[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Where each row begins, and all rows one behind the other."""
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    return starts, np.array([u for row in rows for u in row], dtype=np.int32)


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _call(name: str, *arguments: int | ctypes.c_void_p) -> int:
    """A compiled sweep. The library stands nowhere else: what holds a `Reach` can be copied and pickled."""
    return getattr(_library(), f"lowtide_{name}")(*arguments)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    from lowtide.native import load

    return load(Path(__file__).with_name("reach.cpp"))


def refuse(sim: Simulator, given: Iterable[int], flags: bytearray) -> NoReturn:
    """Say why `Reach.closure` has no answer.

    Raises:
        PlanError: always.
    """
    given = list(given)
    needed = replay_set(given, sim.producer, [op.reads for op in sim.operations], flags.__getitem__)
    read = [u for index in sorted(needed - {-1}, reverse=True) for u in sim.operations[index].reads]
    for value in (*given, *(u for u in read if not flags[u])):
        index = sim.producer[value]
        if index >= 0 and not sim.operations[index].replayable:
            reason = sim.operations[index].reason or "unknown reason"
            raise PlanError(
                f"value {value} must be stored: {sim.describe(value)} is not replayable ({reason})"
            )
    for value in read:
        if not flags[value] and sim.graph.values[value].must_store:
            raise PlanError(
                f"value {value} must be stored: {sim.describe(value)} is read by a replay that may not reach "
                "further back"
            )
    _refuse_overwritten(
        sim, next(u for u in (*read, *given) if flags[u] == 2 or (sim.producer[u] < 0 and not flags[u]))
    )


def _refuse_overwritten(sim: Simulator, value: int) -> NoReturn:
    raise PlanError(
        f"a replay rests on value {value} ({sim.describe(value)}), which the step overwrites: store what is "
        "made from it"
    )
