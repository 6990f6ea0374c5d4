"""Local search with the exact simulator: single decisions changed for less time, or for a lower peak; and all
plans of a small step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lowtide.errors import PlanError
from lowtide.plan.bound.effort import Effort
from lowtide.plan.data import Move
from lowtide.plan.simulate.closure import replay_set
from lowtide.plan.simulate.simulator import Simulation, Simulator

_PASSES = 4
"""Times that `LocalSearch.faster` goes through what it may store."""

_TRIES = 300
"""Values that it tries to store in all."""

_FAILURES = 80
"""Values that it tries in vain, one after another, before it ends."""

_TURNS = 60
"""Decisions at the peak that are changed and simulated in vain before `LocalSearch.lower` ends."""

_BOUNDED = 0.4
"""What closing a set and bounding its peak takes, as a share of a simulation."""

_MOST_CHOICES = 10
"""Steps with at most this many values to decide about are enumerated: 2 to this power simulations."""


@dataclass(frozen=True)
class Candidate:
    """What is stored and what moves, simulated exactly.

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
        """How high it reaches, and at how many moments."""
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
        return self._simulated(self.sim.close(stored))

    def _simulated(self, closed: frozenset[int]) -> Candidate:
        self.effort.simulated(len(self.sim.graph.operations))
        return Candidate(closed, self.sim.simulate(closed))

    @cached_property
    def everything(self) -> list[Candidate]:
        """All plans of a small step; of a larger one, none."""
        sim = self.sim
        again = replay_set(sim.droppable, sim.producer, sim.reads, bytes(len(sim.producer))) - {-1}
        read = {u for index in again for u in sim.reads[index] if sim.producer[u] >= 0 and sim.storable[u]}
        choices = sorted((read | set(sim.droppable)) - sim.forced)
        found: list[Candidate] = []
        for bits in range(1 << len(choices) if len(choices) <= _MOST_CHOICES else 0):
            stored = frozenset(v for k, v in enumerate(choices) if bits >> k & 1)
            with suppress(PlanError):
                found.append(Candidate(stored, sim.simulate(stored)))
        return found

    def faster(self, best: Candidate, budget: int) -> Candidate:
        """``best`` with more stored while the budget allows it, the most seconds a byte first; the exact
        simulation decides each step.
        """
        graph = self.sim.graph
        tries, failures, improved = _TRIES, 0, True
        for _ in range(_PASSES):
            if not improved:
                break
            improved = False
            promising = [
                (
                    -(graph.operations[index].seconds + graph.replay_overhead_seconds) / max(size, 1),
                    index,
                    values,
                )
                for index, size, values in self._to_store(best)
            ]
            for _, index, values in sorted(promising):
                if tries <= 0 or failures >= _FAILURES or self.effort.over:
                    return best
                if index not in best.simulation.replayed:
                    continue
                tries -= 1
                failures += 1
                other = self.candidate(best.stored.union(values))
                if other.simulation.peak_bytes <= budget and other.key < best.key:
                    best, improved, failures = other, True, 0
        return best

    def lower(self, best: Candidate, budget: int = 0) -> Candidate:
        """``best`` after single decisions were changed at its peak, each of which made it lower, or as high
        at fewer moments, until it fits in ``budget`` bytes.
        """
        tried: set[frozenset[int]] = {best.stored}
        turns = _TURNS
        improved = True
        while improved and best.simulation.peak_bytes > budget:
            improved = False
            peak, at = best.simulation.peak_bytes, best.simulation.peak_event
            for stored in self._changed(best, budget):
                if turns <= 0 or self.effort.over:
                    return best
                closed = self.sim.close(stored)
                if closed in tried:
                    continue
                tried.add(closed)
                self.effort.simulated(_BOUNDED * len(self.sim.graph.operations))
                if self.sim.least_at(closed, at) >= peak:
                    continue
                turns -= 1
                other = self._simulated(closed)
                if other.height < best.height:
                    best, improved, turns = other, True, _TURNS
                    break
        return best

    def _changed(self, best: Candidate, budget: int) -> Iterator[frozenset[int]]:
        """Sets of stored values that differ in one decision that may matter at the peak.

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
        for _, _, v in sorted(evictable):
            yield best.stored - {v}
        kept = [(size, graph.operations[i].writes[0], values) for i, size, values in self._to_store(best)]
        for _, _, values in sorted(kept):
            yield best.stored.union(values)

    def _to_store(self, best: Candidate) -> Iterator[tuple[int, int, list[int]]]:
        """Operations that run again, bytes of what they write that could stay and does not, and those values;
        with them go earlier versions, which cost nothing then.
        """
        sim, graph = self.sim, self.sim.graph
        for index in best.simulation.replayed:
            written = graph.operations[index].writes
            outputs = [w for w in written if sim.storable[w] and w not in best.stored and w not in sim.forced]
            if outputs:
                earlier = [v for w in outputs for v in sim.companions.get(w, ())]
                yield index, sum(sim.value_bytes[w] for w in outputs), outputs + earlier
