"""What brings given-up values back, and what that rests on: the part of a simulation that grows with the
number of operations.

A `Reach` has what one step's operations read in the form in which a planner asks for it thousands of times:
without parameters and the like, which are always there, and without a look at the graph's own objects.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NoReturn

from lowtide.errors import PlanError
from lowtide.graph import Operation
from lowtide.plan.simulate.closure import replay_set
from lowtide.plan.simulate.index import StepIndex


class Reach:
    """What the operations of a step read.

    Attributes:
        reads: operation -> what it reads that may be missing.
        lasting: operation -> what it reads that does not outlive the step by itself.
        refused: whether an operation may not run again.
        must_store: whether a replay may not reach beyond a value.
        storable: whether a value can be stored.
        forced: values that a checkpointing scope asked to be given up.
        must: what `lowtide.plan.simulate.feasible.close` has found.
        producer: value -> what brings it back, -1 for what stood before the step.
    """

    def __init__(self, sim: StepIndex) -> None:
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
        none: list[Sequence[int]] = [() for _ in fetches]
        twin.reads, twin.lasting = [*self.reads, *none], [*self.lasting, *none]
        twin.refused = self.refused + bytearray(not op.replayable for op in fetches)
        twin.producer = producer
        return twin

    def closure(self, given: list[int], flags: bytearray) -> list[int] | None:
        """The operations that bring ``given`` back from what ``flags`` says is stored, in their order;
        ``None`` where that is not possible.
        """
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


def refuse(sim: StepIndex, given: Iterable[int], flags: bytearray) -> NoReturn:
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


def _refuse_overwritten(sim: StepIndex, value: int) -> NoReturn:
    raise PlanError(
        f"a replay rests on value {value} ({sim.describe(value)}), which the step overwrites: store what is "
        "made from it"
    )
