"""Local search: change decisions of a plan for less time, or for a lower peak, as many at once as pay.

In: a step's `Simulator` and a `Candidate`. Out: better ones, each simulated exactly. `LocalSearch` makes a
candidate faster or lower; a `Descent` makes one lower and lower, as far as it is asked to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from lowtide.plan.bound import Effort
from lowtide.plan.data import Move
from lowtide.plan.simulate.simulator import Simulation, Simulator
from lowtide.progress import current
from lowtide.words import by_members

_PASSES = 4
"""How often `LocalSearch.faster` goes through the values that it may store."""

_FAILURES = 80
"""How many values in a row `LocalSearch.faster` tries in vain before it ends."""

_TURNS = 60
"""How many changes at the peak are simulated in vain before `LocalSearch.lower` ends."""

_BOUNDED = 0.4
"""Work of closing a set and bounding its peak, as a share of a simulation's."""


@dataclass(frozen=True)
class Candidate:
    """A set of stored and of moved values, simulated exactly.

    Attributes:
        stored: values that stay on the device.
        simulation: what that does.
        moves: values that move, and how.
        window: bytes that may be under way in each direction.
    """

    stored: frozenset[int]
    simulation: Simulation
    moves: dict[int, Move] = field(default_factory=dict, repr=False)
    window: int = 0

    @property
    def key(self) -> tuple[float, int]:
        """What makes a candidate better: seconds first, then bytes."""
        return (self.simulation.extra_seconds, self.simulation.peak_bytes)

    @property
    def height(self) -> tuple[int, int]:
        """Its peak in bytes, and at how many events it is reached."""
        simulation = self.simulation
        at_peak = np.count_nonzero(simulation.top_bytes == simulation.peak_bytes)
        return (simulation.peak_bytes, int(at_peak))


class LocalSearch:
    """Local search on one step.

    Args:
        sim: the step.
        effort: counts what is simulated, and says when to stop.
    """

    def __init__(self, sim: Simulator, effort: Effort | None = None) -> None:
        self.sim, self.effort = sim, effort or Effort(float("inf"))

    def candidate(self, stored: frozenset[int]) -> Candidate:
        """``stored``, closed and simulated."""
        return self._simulate(self.sim.close(stored))

    def _simulate(self, closed: frozenset[int]) -> Candidate:
        self.effort.note(len(self.sim.graph.operations))
        current().tick()
        return Candidate(closed, self.sim.simulate(closed))

    def faster(self, best: Candidate, budget: int) -> Candidate:
        """``best`` with more stored while the budget allows it, the most seconds a byte first; the exact
        simulation decides each change. One that pays is followed by one of twice as many values.
        """
        graph = self.sim.graph
        for _ in range(_PASSES):
            start, at, many, failures = best, 0, 1, 0
            rows = [
                (
                    -(graph.operations[index].seconds + graph.replay_overhead_seconds) / max(size, 1),
                    index,
                    values,
                )
                for index, size, values in self._to_store(best)
            ]
            rows.sort()
            while at < len(rows) and failures < _FAILURES and not self.effort.over:
                replayed = set(best.simulation.replayed)
                values = [
                    v for _, index, outputs in rows[at : at + many] if index in replayed for v in outputs
                ]
                other = self.candidate(best.stored.union(values)) if values else best
                if other.simulation.peak_bytes <= budget and other.key < best.key:
                    best, at, many, failures = other, at + many, 2 * many, 0
                elif many > 1 and values:
                    many //= 2
                else:
                    at, failures = at + many, failures + bool(values)
            if best is start:
                break
        return best

    def lower(self, best: Candidate, budget: int = 0) -> Candidate:
        """``best`` after decisions were changed at its peak until it fits in ``budget`` bytes, or no change
        makes it lower."""
        *_, lowest = self.descent(best, budget)
        return lowest

    def descent(self, best: Candidate, budget: int = 0) -> Iterator[Candidate]:
        """``best``, and candidates after more and more decisions were changed at the peak, each lower than
        the one before or as high at fewer moments, until one fits in ``budget`` bytes. A change that pays is
        followed by one of twice as many values.
        """
        tried: set[frozenset[int]] = {best.stored}
        many, better = 1, best
        while better:
            best, better, turns = better, None, _TURNS
            yield best
            peak, at = best.simulation.peak_bytes, best.simulation.peak_event
            if peak <= budget:
                break
            changed = chain(self._change(best, budget, many), self._change_alike(best, many))
            for stored, count in changed:
                if turns <= 0 or self.effort.over:
                    break
                closed = self.sim.close(stored)
                if closed in tried:
                    continue
                tried.add(closed)
                self.effort.note(_BOUNDED * len(self.sim.graph.operations))
                if self.sim.least_at(closed, at) >= peak:
                    continue
                turns -= 1
                other = self._simulate(closed)
                if other.height < best.height:
                    better, many = other, 2 * count
                    break

    def _change(self, best: Candidate, budget: int, many: int) -> Iterator[tuple[frozenset[int], int]]:
        """Sets of stored values that differ in decisions that may matter at the peak, and in how many: in up
        to ``many`` of them, then in one.

        First those that evict what is held there: what suffices and costs least, then what takes most bytes.
        Then those that store what is replayed, the smallest first.
        """
        sim, graph = self.sim, self.sim.graph
        at = best.simulation.peak_event
        over = best.simulation.peak_bytes - budget
        evictable: list[tuple[bool, float, int]] = []
        for v in best.stored:
            sid, size = sim.storage_of[v], sim.value_bytes[v]
            if sim.natural_end[sid] <= at < best.simulation.held_until.get(sid, -1):
                seconds = graph.operations[sim.producer[v]].seconds
                evictable.append((size < over, seconds if size >= over else -size, v))
        evicted = [[v] for _, _, v in sorted(evictable)]
        replayed = [(size, graph.operations[i].writes[0], values) for i, size, values in self._to_store(best)]
        stored = [values for _, _, values in sorted(replayed)]
        one_will_do = any(not short for short, _, _ in evictable)
        for change, rows in ((best.stored.difference, evicted), (best.stored.union, stored)):
            count = 1 if one_will_do and rows is evicted else many
            while count > 1:
                first = rows[:count]
                yield change(v for values in first for v in values), len(first)
                count //= 2
            for values in rows:
                yield change(values), 1

    def _change_alike(self, best: Candidate, many: int) -> Iterator[tuple[frozenset[int], int]]:
        """Sets of stored values that differ in one decision of every alike block: where a plan is as high in
        each of them, one decision changed in one lowers it there and raises it in all others.
        """
        stored, evicted = dict[Any, list[int]](), dict[Any, list[int]]()
        for index, _, values in self._to_store(best):
            stored.setdefault(self._alike[index], []).extend(values)
        for v in best.stored:
            if self.sim.producer[v] >= 0 and v not in self.sim.evicted_by_scopes:
                evicted.setdefault(self._alike[self.sim.producer[v]], []).append(v)
        for change, groups in ((best.stored.union, stored), (best.stored.difference, evicted)):
            for values in sorted(
                groups.values(), key=lambda group: sum(self.sim.value_bytes[v] for v in group)
            ):
                if len({self.sim.producer[v] for v in values}) > 1:
                    yield change(values), many

    @cached_property
    def _alike(self) -> list[Any]:
        """Of each operation what it shares with those in its place in alike blocks: the block's name without
        its number, and which of the operations there it is."""
        seen, kinds = Counter[tuple[str, str]](), list[Any]()
        for op in self.sim.graph.operations:
            seen[op.module, op.name] += 1
            kinds.append((by_members(op.module)[0], op.name, seen[op.module, op.name]))
        return kinds

    def _to_store(self, best: Candidate) -> Iterator[tuple[int, int, list[int]]]:
        """Of each operation that runs again: its index, the bytes of results that could be stored, and these
        values, with earlier versions of the same storages, which cost nothing then.
        """
        sim, graph = self.sim, self.sim.graph
        for index in best.simulation.replayed:
            written = graph.operations[index].writes
            outputs = [
                w
                for w in written
                if sim.storable[w] and w not in best.stored and w not in sim.evicted_by_scopes
            ]
            if outputs:
                earlier = [v for w in outputs for v in sim.companions.get(w, ())]
                yield index, sum(sim.value_bytes[w] for w in outputs), outputs + earlier


class Descent:
    """Lower and lower plans from one to begin with, found when they are asked for.

    Args:
        local: finds them, with an effort of its own, so that budgets asked for before change nothing.
        start: where to begin.
    """

    def __init__(self, local: LocalSearch, start: Candidate) -> None:
        self._effort, self._rest, self._seen = local.effort, local.descent(start), list[Candidate]()

    @property
    def spent(self) -> float:
        """Effort so far."""
        return self._effort.spent

    def within(self, budget: int) -> Candidate | None:
        """The first plan that fits in ``budget`` bytes."""
        for candidate in self._seen:
            if candidate.simulation.peak_bytes <= budget:
                return candidate
        for candidate in self._rest:
            self._seen.append(candidate)
            if candidate.simulation.peak_bytes <= budget:
                return candidate
        return None

    def end(self) -> Candidate:
        """The lowest plan."""
        self._seen += self._rest
        return self._seen[-1]
