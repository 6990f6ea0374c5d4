"""The exact memory and time of a step under a set of stored values, by walking the step graph's events.

In: a `StepGraph` and the ids of the values that are stored. Out: a `Simulation`: live bytes at every event,
their peak and where it is, the operations that run again, and their seconds. The executor keeps to the
same rules (docs/design.md, 5 to 10), so what is predicted here is what the meter reads there. A `Simulator`
holds the graph's indices, because a planner asks thousands of times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, filterfalse
from typing import NoReturn

import numpy as np

from lowtide.errors import BudgetError, PlanError
from lowtide.graph import Operation, StepGraph
from lowtide.plan.data import module_in_words
from lowtide.plan.simulate.index import Bytes, Sources, StepIndex, Transfers, bytes_over_time, replay_set
from lowtide.plan.simulate.walk import LiveCopies, Walk


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a step does under one set of stored values.

    Attributes:
        stored: the stored values that were asked for.
        sources: where the others come back from.
        replayed: indices of the operations that run again in backward (rule 6), in forward order.
        evicted: ids of the saved values that are evicted.
        peak_bytes: the most live bytes at any moment, within operations and replays too.
        peak_event: index of the event at which the peak is.
        peak_operation: the operation that runs then (a replayed one when ``peak_in_replay``), or ``None`` in
            a step without operations.
        peak_in_replay: whether the peak is within a replay.
        extra_seconds: what the plan adds to the step.
        live_bytes: live bytes after every event.
        top_bytes: the most live bytes at any moment of every event.
        held_until: storage id -> event after which a plan lets a storage go that would naturally have died
            earlier.
        transfers: what transfers do, where values move.
    """

    stored: frozenset[int]
    sources: Sources = field(repr=False)
    replayed: tuple[int, ...]
    evicted: tuple[int, ...]
    peak_bytes: int
    peak_event: int
    peak_operation: Operation | None
    peak_in_replay: bool
    extra_seconds: float
    live_bytes: Bytes = field(repr=False)
    top_bytes: Bytes = field(repr=False)
    held_until: dict[int, int] = field(repr=False)
    transfers: Transfers | None = field(default=None, repr=False)

    @property
    def peak_module(self) -> str:
        """Qualified name of the module in which the peak is."""
        return self.peak_operation.module if self.peak_operation else ""

    def with_resident(self, more: int) -> Simulation:
        """The same step beside so many bytes that are live throughout."""
        return replace(
            self,
            peak_bytes=self.peak_bytes + more,
            live_bytes=self.live_bytes + more,
            top_bytes=self.top_bytes + more,
        )


class Simulator(StepIndex):
    """Simulates one step graph under many sets of stored values."""

    def __init__(self, graph: StepGraph) -> None:
        super().__init__(graph)
        top = self._live(self.storage_hold) + self.scratch
        self.plain_peak = int(top.max(initial=graph.resident_bytes))

    def _live(self, hold: dict[int, int]) -> Bytes:
        """Live bytes after every event when each storage is held until ``hold[storage]``."""
        changes: list[tuple[int, int]] = []
        for sid, until in hold.items():
            start = self.natural_end[sid]
            if start < until:
                size = self.graph.storages[sid].bytes
                changes += ((start, size), (until, -size))
        return self.natural_live + bytes_over_time(changes, self.end)

    def flags(self, stored: Iterable[int]) -> bytearray:
        """One byte a value: 1 where it is stored or was resident before the step, 2 where it is kept for
        backward as PyTorch would keep it but no replay may start from it.

        Raises:
            PlanError: a value cannot be stored.
        """
        flags = bytearray(self.base_flags)
        storable = self.storable
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

    def closure(self, evicted: list[int], flags: bytearray, sources: Sources | None = None) -> list[int]:
        """The operations that bring ``evicted`` back from what ``flags`` says is stored, in their order.

        Raises:
            PlanError: one of them is not replayable, or rests on a value that is not there.
        """
        sources = sources or self.sources
        needed = replay_set(evicted, sources.producer, sources.reads, flags)
        lost = not self.unreplayable.isdisjoint(needed)
        if lost or (2 in flags and any(flags[u] == 2 for index in needed for u in sources.reads[index])):
            _refuse(self, sources, evicted, flags)
        return sources.in_order(needed)

    def _refuse_absent(self, evicted: list[int], flags: bytearray, sources: Sources) -> None:
        """Check that no replay reads a gathered storage where that is empty.

        Raises:
            PlanError: one does.
        """
        together: dict[int, list[int]] = {}
        for value, event in self.unpacks_of(evicted):
            together.setdefault(self.latest_fill[event], []).append(value)
        for fill, values in together.items():
            for index in replay_set(values, sources.producer, sources.reads, flags):
                if index < len(self.graph.operations) and not self.present(index, fill):
                    op = self.graph.operations[index]
                    raise PlanError(
                        f"{op.name} (operation {index}, {module_in_words(op.module)}) cannot run again where "
                        "backward asks for what rests on it: its sharded weights are not gathered there. "
                        "Store what lies between"
                    )

    def simulate(
        self,
        stored: Collection[int],
        sources: Sources | None = None,
        seen: list[LiveCopies] | None = None,
    ) -> Simulation:
        """The step under ``stored`` (rules 5 to 10 of docs/design.md; for values that move, see
        docs/stores.md).

        Args:
            stored: ids of the values that stay.
            sources: where the others come back from, where some move.
            seen: is filled with what replays hold at each moment.

        Raises:
            PlanError: a value in ``stored`` cannot be stored, or what is evicted cannot be brought back.
        """
        graph, sources = self.graph, sources or self.sources
        flags = self.flags(stored)
        evicted = list(filterfalse(flags.__getitem__, self.droppable))
        every = self.closure(evicted, flags, sources)
        if self.has_gathered:
            self._refuse_absent(evicted, flags, sources)
        kept, until = self._held_for_replays(every, evicted, flags, sources)
        walk = self._walk(every, evicted, flags, until, sources, seen)
        hold = self._held(flags, kept)
        outgoing, encoded, scratch = None, 0, self.scratch
        if sources.moving is not None:
            outgoing = sources.moving.outgoing(self, sources, until)
            for sid, last in outgoing.hold.items():
                hold[sid] = max(last, hold.get(sid, -1))
            encoded, scratch = bytes_over_time(outgoing.level, self.end), outgoing.scratch(self.scratch)
        natural = self._live(hold) + encoded
        live = natural + bytes_over_time(walk.level, self.end)
        top = live + scratch
        for event, bytes_, _ in walk.tops:
            top[event] = max(top[event], natural[event] + bytes_)
        event, peak = -1, graph.resident_bytes
        if self.end and top.max() >= peak:
            event, peak = int(np.argmax(top)), int(top.max())
        operation, in_replay = self._operation_at(event, peak - int(live[event]) if event >= 0 else 0, walk)
        extra = 0.0
        for index in chain(walk.running, walk.repeats):
            extra += sources.operations[index].seconds
        extra += graph.replay_overhead_seconds * (len(walk.running) + len(walk.repeats))
        transfers = outgoing.transfers(walk) if outgoing is not None else None
        extra += transfers.seconds if transfers is not None else 0.0
        extra += graph.overhead_seconds if evicted else 0.0
        replayed = walk.running
        if sources.moving is not None:
            evicted = list(filterfalse(sources.moved.__contains__, evicted))
            replayed = list(filter(range(sources.own).__contains__, replayed))
        return Simulation(
            stored=frozenset(stored),
            sources=sources,
            replayed=tuple(replayed),
            evicted=tuple(evicted),
            peak_bytes=peak,
            peak_event=event,
            peak_operation=operation,
            peak_in_replay=in_replay,
            extra_seconds=extra,
            live_bytes=live,
            top_bytes=top,
            held_until={sid: last for sid, last in hold.items() if last > self.natural_end[sid]},
            transfers=transfers,
        )

    def _held(self, flags: bytearray, kept: dict[int, int]) -> dict[int, int]:
        """Storage -> the event until which autograd holds it, or replays that read it (``kept``)."""
        hold: dict[int, int] = {}
        for value, last in chain(self.saved_hold.items(), kept.items()):
            if flags[value]:  # of what replays read all is stored
                sid = self.storage_of[value]
                hold[sid] = max(last, hold.get(sid, -1))
        return hold

    def refusal(self, least: Simulation, budget_bytes: int, policy: str = "") -> BudgetError:
        """The refusal of a budget, with the peak of the plan that takes least.

        Args:
            least: what the step takes under that plan.
            budget_bytes: what was asked for.
            policy: the policy that makes the plan, where another may need less.
        """
        peak = self, least
        return BudgetError(None, least.peak_bytes, budget_bytes=budget_bytes, policy=policy, peak=peak)

    def close(self, stored: Iterable[int]) -> frozenset[int]:
        """The smallest feasible set of stored values that includes all of ``stored`` that is read.

        Values that replays would need but that cannot be brought back are added; values that neither backward
        nor a replay reads are left out. What a checkpointing scope evicts is not stored where it can come
        back.
        """
        storable = self.storable
        closed = set(stored).difference(self.evicted_by_scopes)
        closed.update(self.must_droppable)
        for v, companions in self.companions.items():
            if v in closed and v in self.saved_of:
                closed.update(companions)
        evicted = list(filterfalse(closed.__contains__, self.droppable))
        there = bytearray(self.must_storable)
        for v in closed:
            there[v] = storable[v]
        needed = replay_set(evicted, self.producer, self.reads, there)
        needed.discard(-1)
        read = set(chain.from_iterable(map(self.reads.__getitem__, needed)))
        # A stored version that the step overwrites serves backward alone: what a replay reads of it has to be
        # replayed, too.
        used = {v for v in closed if v in self.saved_of and (storable[v] or v not in read)}
        used.update(filter(there.__getitem__, read))
        return frozenset(filterfalse(self.given.__getitem__, used))

    def least_at(self, stored: Collection[int], event: int) -> int:
        """A lower bound of the live bytes that `simulate` finds within ``event``: replayed copies are left
        out, so that no walk is needed.
        """
        flags = self.flags(stored)
        evicted = list(filterfalse(flags.__getitem__, self.droppable))
        kept, _ = self._held_for_replays(self.closure(evicted, flags), evicted, flags, self.sources)
        held = int(self.natural_live[event] + self.scratch[event])
        for sid, until in self._held(flags, kept).items():
            if self.natural_end[sid] <= event < until:
                held += self.graph.storages[sid].bytes
        return held

    def _operation_at(self, event: int, above: int, walk: Walk) -> tuple[Operation | None, bool]:
        """The operation that runs at ``event``, and whether it is a replay."""
        graph = self.graph
        most = (-1, -1)
        for at, bytes_, index in walk.tops if above > 0 else ():
            if at == event:
                most = max(most, (bytes_, index))
        if most[1] >= 0:
            return walk.sources.operations[most[1]], True
        for kind, index in reversed(graph.events[: event + 1]):
            if kind == "op":
                return graph.operations[index], False
        return (graph.operations[0] if graph.operations else None), False

    def _walk(
        self,
        every: list[int],
        evicted: list[int],
        flags: bytearray,
        until: dict[int, int],
        sources: Sources,
        seen: list[LiveCopies] | None,
    ) -> Walk:
        """The walk through what happens to the evicted values. Of the operations ``every`` that could bring
        them back, those that only values need which are never unpacked do not run again: they
        count as readers of their arguments until ``until``.
        """
        unpacked = list(filter(self.last_unpack.__contains__, evicted))
        running = every if len(unpacked) == len(evicted) else self.closure(unpacked, flags, sources)
        happenings = list(chain.from_iterable(map(self.happenings.__getitem__, evicted)))
        for happening in self.unasked:
            if not flags[happening[2]]:
                happenings.append(happening)
        for index in set(every).difference(running):
            if until[index] > self.first_unpack:
                happenings += [(until[index], "gone", u) for u in sources.reads[index] if not flags[u]]
        if sources.moving is not None:
            return sources.moving.walk(self, sources, flags, running, happenings, seen)
        walk = Walk(self, sources, flags, running, seen)
        walk.run(happenings)
        return walk

    def _held_for_replays(
        self, order: list[int], evicted: list[int], flags: bytearray, sources: Sources
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Rule 7: stored value -> the last release of an evicted saved tensor whose replay reads it; the same
        for replayed operations.
        """
        producer, release, reads = sources.producer, self.saved_release, sources.held_reads
        until: dict[int, int] = {}
        for value in evicted:
            index = producer[value]
            if release[value] > until.get(index, -1):
                until[index] = release[value]
        hold: dict[int, int] = {}
        for index in reversed(order):
            last = until[index]
            for u in reads[index]:
                if flags[u]:
                    if last > hold.get(u, -1):
                        hold[u] = last
                elif last > until.get(producer[u], -1):
                    until[producer[u]] = last
        return hold, until


@lru_cache(maxsize=2)
def simulator_of(graph: StepGraph) -> Simulator:
    """The simulator of a step: several ask for the same one, one after the other."""
    return Simulator(graph)


@lru_cache(maxsize=2)
def plain(graph: StepGraph) -> Simulation:
    """The step of ``graph`` with everything kept, as PyTorch runs it."""
    simulator = simulator_of(graph)
    return simulator.simulate(simulator.droppable)


def _refuse(sim: StepIndex, sources: Sources, evicted: Iterable[int], flags: bytearray) -> NoReturn:
    """Say why what is evicted cannot be brought back.

    Raises:
        PlanError: always.
    """
    evicted = list(evicted)
    needed = replay_set(evicted, sources.producer, [op.reads for op in sources.operations], flags)
    read = [u for index in sorted(needed - {-1}, reverse=True) for u in sources.operations[index].reads]
    for value in (*evicted, *(u for u in read if not flags[u])):
        index = sources.producer[value]
        if index >= 0 and not sources.operations[index].replayable:
            reason = sources.operations[index].reason or "unknown reason"
            raise PlanError(
                f"value {value} must be stored: {sim.describe(value)} is not replayable ({reason})"
            )
    lost = next(u for u in (*read, *evicted) if flags[u] == 2 or (sources.producer[u] < 0 and not flags[u]))
    raise PlanError(
        f"a replay rests on value {lost} ({sim.describe(lost)}), which the step overwrites: store what is "
        "made from it"
    )
