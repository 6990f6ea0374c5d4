"""Search with the exact simulator alone: all plans of a small step, and single exchanges in a good plan of a
large one.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.plan.closure import replay_set
from lowtide.plan.feasible import close
from lowtide.plan.simulate import Simulation, Simulator

_MOST_CHOICES = 10
"""Steps with at most this many values to decide about are enumerated: 2 to this power simulations."""


@dataclass(frozen=True)
class Candidate:
    """A set of stored values with its exact simulation."""

    stored: frozenset[int]
    simulation: Simulation

    @property
    def key(self) -> tuple[float, int]:
        """What makes a candidate better: seconds first, then bytes."""
        return (self.simulation.extra_seconds, self.simulation.peak_bytes)


class Search:
    """Exact search on one step."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self._everything: list[Candidate] | None = None

    def candidate(self, stored: frozenset[int]) -> Candidate:
        """``stored``, closed and simulated."""
        closed = close(self.sim.graph, stored, self.sim)
        return Candidate(closed, self.sim.simulate(closed))

    def choices(self) -> list[int]:
        """The values that are worth storing: saved, or read by operations that bring saved values back."""
        sim = self.sim
        graph = sim.graph
        needed = replay_set(
            sim.droppable, sim.producer, [op.reads for op in graph.operations], lambda u: False
        ) - {-1}
        read = {
            u
            for index in needed
            for u in graph.operations[index].reads
            if sim.producer[u] >= 0 and graph.values[u].storable
        }
        return sorted(read | set(sim.droppable))

    def everything(self) -> list[Candidate]:
        """All plans that there are, when the step is small; otherwise none."""
        if self._everything is None:
            self._everything = []
            choices = self.choices()
            if len(choices) <= _MOST_CHOICES:
                for bits in range(1 << len(choices)):
                    stored = frozenset(v for k, v in enumerate(choices) if bits >> k & 1)
                    try:
                        self._everything.append(Candidate(stored, self.sim.simulate(stored)))
                    except PlanError:
                        continue
        return self._everything

    def polish(self, start: Candidate, budget: int, tries: int = 300) -> Candidate:
        """Store more where the budget has room, the most seconds a byte first; the exact simulation decides
        each step.
        """
        graph, sim = self.sim.graph, self.sim
        best = start
        failures = 0
        for _ in range(4):
            moves: list[tuple[float, int, list[int]]] = []
            for index in best.simulation.replayed:
                op = graph.operations[index]
                outputs = [w for w in op.writes if graph.values[w].storable and w not in best.stored]
                outputs += [earlier for w in outputs for earlier in sim.companions.get(w, ())]
                size = sum(sim.value_bytes[w] for w in outputs if graph.values[w].storable)
                if outputs:
                    moves.append(
                        (-(op.seconds + graph.replay_overhead_seconds) / max(size, 1), index, outputs)
                    )
            improved = False
            for _, index, outputs in sorted(moves):
                if tries <= 0 or failures >= 80:
                    return best
                if index not in best.simulation.replayed:
                    continue
                tries -= 1
                failures += 1
                other = self.candidate(best.stored | frozenset(outputs))
                if other.simulation.peak_bytes <= budget and other.key < best.key:
                    best, improved, failures = other, True, 0
            if not improved:
                break
        return best
