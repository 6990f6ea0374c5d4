"""Choose a configuration for every stretch of the step: an exact walk over stages, under one budget.

Because every segment adds a constant outside its own forward and window, the memory at any moment is what the
earlier segments hold plus the segment's own peak. So the best choice is a shortest path: after each stage,
the states that matter are (bytes held so far, seconds so far). Alike segments share their configurations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.plan.search.segment import LONGEST_SEGMENT, Configuration, Front, Segment
from lowtide.plan.simulate.feasible import feasible_replays
from lowtide.plan.simulate.simulator import Bytes, Simulator
from lowtide.plan.split.stages import Stages

_EFFORT = 2400
"""Configurations that are walked through, over all distinct stretches."""

_STATES = 60_000
"""States kept over all stages: what a step's stages share."""


@dataclass(frozen=True, eq=False)
class Option:
    """The configurations of stages ``first`` to ``last`` (exclusive), with what they need there.

    Attributes:
        first, last: the stages.
        front: what the search of an alike stretch found.
        events: event ranges of its forward and its window.
        held, late: per configuration, bytes held, and how many of them cost nothing in the forward.
        forward_need, window_need, seconds: per configuration, the most live bytes in its own events, and
            seconds.
    """

    first: int
    last: int
    front: Front
    events: tuple[tuple[int, int], tuple[int, int]]
    held: NDArray[np.int64]
    late: NDArray[np.int64]
    forward_need: NDArray[np.int64]
    window_need: NDArray[np.int64]
    seconds: NDArray[np.float64]

    @property
    def configurations(self) -> list[Configuration]:
        """Its configurations."""
        return self.front.configurations


class PathSearch:
    """All options of a step, and the best path through them for a budget."""

    def __init__(self, sim: Simulator, stages: Stages) -> None:
        self.sim = sim
        self.stages = stages
        self.feasible = feasible_replays(sim)
        self.classes: dict[tuple[int, ...], Front] = {}
        """signatures of stages -> their front"""
        self.options: list[list[Option]] = [[] for _ in range(len(stages))]
        """options by their first stage"""
        self.base = stages.base
        self.late = self._late()
        self._build()

    def _late(self) -> list[tuple[int, int, int, int]]:
        """Values that the program itself holds beyond their owner's forward: (owner, from event, to event,
        bytes).

        A segment's held bytes count from the end of its forward, where the base counts such values a second
        time.
        """
        sim, stages = self.sim, self.stages
        late: list[tuple[int, int, int, int]] = []
        for v, k in stages.owner.items():
            start, stop = stages.forward_events[k][1], sim.natural_end[sim.storage_of[v]]
            if v not in stages.everywhere and start < stop < min(
                sim.saved_hold.get(v, -1), stages.forward_end
            ):
                late.append((k, start, stop, sim.value_bytes[v]))
        return late

    def correct(self, path: list[tuple[Option, int]], top: Bytes) -> None:
        """Take over what an exact simulation of ``path`` says about the moments that the model gets wrong."""
        model = self.base.copy()
        last = self.stages.forward_end
        for option, choice in path:
            c = option.configurations[choice]
            (fa, fb), (wa, wb) = option.events
            model[fa:fb] += c.profile[: fb - fa]
            model[wa:wb] += c.profile[fb - fa :]
            model[fb:wa] += c.held_bytes
            if fb <= last:
                model[fb : last + 1] -= c.late_bytes
            for owner, start, stop, size in self.late:
                if owner < option.first:
                    model[max(start, fa) : max(min(stop, fb), max(start, fa))] -= size
        self.base = self.base + (top - model)
        self.options = [[self._option(o.first, o.last, o.front) for o in here] for here in self.options]

    def restore(self) -> None:
        """Forget the corrections."""
        if self.base is not self.stages.base:
            self.base = self.stages.base
            self.options = [[self._option(o.first, o.last, o.front) for o in here] for here in self.options]

    def _build(self) -> None:
        count = len(self.stages)
        signature = self.stages.signature
        for length in (1, 2, 3, 4):
            distinct = len({signature[k : k + length] for k in range(count - length + 1)})
            if not distinct:
                continue
            share = int(_EFFORT * (0.45, 0.35, 0.1, 0.1)[length - 1]) // distinct
            if length > 1 and share < 24:
                break
            for first in range(count - length + 1):
                if length > 1 and len(self.stages.operations(first, first + length)) > LONGEST_SEGMENT:
                    # but a stage alone, however long where it cannot be cut: without it no path reaches the
                    # end
                    continue
                self._add(first, first + length, max(24, min(share, 2500)))

    def _add(self, first: int, last: int, effort: int) -> None:
        key = self.stages.signature[first:last]
        if key not in self.classes:
            segment = Segment(self.sim, self.stages, first, last, self.feasible)
            seeds = self._seeds(segment, first, last)
            self.classes[key] = segment.search(effort, seeds, 64 if last - first < 3 else 24)
        self.options[first].append(self._option(first, last, self.classes[key]))

    def _seeds(self, segment: Segment, first: int, last: int) -> list[int]:
        """Configurations of a longer stretch, put together from those of its parts."""
        if last - first == 1:
            return []
        parts = [self.classes[self.stages.signature[k : k + 1]] for k in range(first, last)]
        unit = {segment.position[index]: bit for bit, index in enumerate(segment.units)}
        fronts: list[list[int]] = []
        offset = 0
        for part in parts:
            masks: dict[int, None] = {}
            for c in part.configurations:
                mask = 0
                for bit, (position, _) in enumerate(part.units):
                    at = offset + position
                    if c.kept >> bit & 1 and at in unit:
                        mask |= 1 << unit[at]
                masks[mask] = None
            fronts.append(list(masks))
            offset += part.operations
        longest = max(len(f) for f in fronts)
        seeds: dict[int, None] = {}
        for k in range(min(longest, 12)):
            mask = 0
            for f in fronts:
                mask |= f[k * len(f) // min(longest, 12)]
            seeds[mask] = None
        return list(seeds)

    def _option(self, first: int, last: int, front: Front) -> Option:
        configurations = front.configurations
        stages, graph = self.stages, self.sim.graph
        (fa, fb), (wa, wb) = (
            (stages.forward_events[first][0], stages.forward_events[last - 1][1]),
            (stages.window_events[last - 1][0], stages.window_events[first][1]),
        )
        natural = np.concatenate([self.base[fa:fb], self.base[wa:wb]])
        for owner, start, stop, size in self.late:
            if owner < first and start < fb and stop > fa:
                natural[max(start, fa) - fa : min(stop, fb) - fa] -= size
        operations = stages.operations(first, last)
        cost = [graph.operations[i].seconds + graph.replay_overhead_seconds for i in operations]
        return Option(
            first,
            last,
            front,
            ((fa, fb), (wa, wb)),
            np.array([c.held_bytes for c in configurations], dtype=np.int64),
            np.array([c.late_bytes for c in configurations], dtype=np.int64),
            np.array(
                [int((natural + c.profile)[: fb - fa].max(initial=0)) for c in configurations], dtype=np.int64
            ),
            np.array(
                [int((natural + c.profile)[fb - fa :].max(initial=0)) for c in configurations], dtype=np.int64
            ),
            np.array([sum(cost[k] for k in c.replayed) for c in configurations]),
        )

    def stored(self, path: list[tuple[Option, int]]) -> frozenset[int]:
        """The values that a path stores."""
        kept: set[int] = set(self.stages.everywhere)
        graph = self.sim.graph
        for option, choice in path:
            operations = self.stages.operations(option.first, option.last)
            mask = option.configurations[choice].kept
            inside = {
                w
                for i in operations
                for w in graph.operations[i].writes
                if self.stages.last_stage[w] < option.last
            }
            for bit, (position, outputs) in enumerate(option.front.units):
                if mask >> bit & 1:
                    writes = graph.operations[operations[position]].writes
                    kept.update(writes[k] for k in outputs)
            for i in operations:
                kept.update(
                    w for w in graph.operations[i].writes if w not in inside and graph.values[w].storable
                )
        return frozenset(kept)

    def best(self, budget: int) -> list[tuple[Option, int]] | None:
        """The path with the least seconds whose memory stays within ``budget``, or ``None``."""
        count = len(self.stages)
        most = max(300, min(1500, _STATES // max(count, 1)))
        quantum = max(1, (self.sim.plain_peak - self.sim.graph.resident_bytes) // most)
        states: list[_States | None] = [None] * (count + 1)
        pending: list[list[_States]] = [[] for _ in range(count + 1)]
        pending[0].append(_States.start())
        for k in range(count + 1):
            states[k] = _States.merge(pending[k], most, quantum)
            here = states[k]
            pending[k] = []
            if here is None or k == count:
                continue
            for which, option in enumerate(self.options[k]):
                after = here.extend(option, budget, k, which)
                if after is not None:
                    pending[option.last].append(after)
        final = states[count]
        if final is None:
            return None
        row = int(np.lexsort((final.held, final.seconds))[0])
        path: list[tuple[Option, int]] = []
        k = count
        while k:
            here = states[k]
            assert here is not None
            first, which, choice, row = (int(here.back[row, c]) for c in range(4))
            path.append((self.options[first][which], choice))
            k = first
        return path[::-1]

    def least(self) -> tuple[int, list[tuple[Option, int]]]:
        """The smallest budget that a path fits in, and that path."""
        low, high = 0, int(max(self.stages.base.max(initial=0), self.sim.plain_peak)) * 2
        best: list[tuple[Option, int]] = []
        path = self._lightest(high)
        while path is None:
            high *= 2
            path = self._lightest(high)
        best = path
        while low < high:
            middle = (low + high) // 2
            path = self._lightest(middle)
            if path is None:
                low = middle + 1
            else:
                high, best = middle, path
        return high, best

    def _lightest(self, budget: int) -> list[tuple[Option, int]] | None:
        """The path that holds the fewest bytes after each stage, within ``budget``."""
        count = len(self.stages)
        least: list[tuple[int, int, tuple[int, int, int]] | None] = [None] * (count + 1)
        least[0] = (0, 0, (0, 0, 0))
        for k in range(count):
            here = least[k]
            if here is None:
                continue
            for which, option in enumerate(self.options[k]):
                fits = (option.window_need + here[0] <= budget) & (
                    option.forward_need + here[0] - here[1] <= budget
                )
                if not fits.any():
                    continue
                held = np.where(fits, option.held, np.iinfo(np.int64).max)
                choice = int(np.argmin(held))
                total = here[0] + int(held[choice])
                old = least[option.last]
                if old is None or total < old[0]:
                    least[option.last] = (total, here[1] + int(option.late[choice]), (k, which, choice))
        path: list[tuple[Option, int]] = []
        k = count
        while k:
            here = least[k]
            if here is None:
                return None
            first, which, choice = here[2]
            path.append((self.options[first][which], choice))
            k = first
        return path[::-1]


@dataclass(frozen=True, eq=False)
class _States:
    """Non-dominated (bytes held, seconds), with where each came from: first stage, option, configuration,
    row.
    """

    held: NDArray[np.int64]
    late: NDArray[np.int64]
    seconds: NDArray[np.float64]
    back: NDArray[np.int64]

    @classmethod
    def start(cls) -> _States:
        return cls(
            np.zeros(1, dtype=np.int64),
            np.zeros(1, dtype=np.int64),
            np.zeros(1),
            np.zeros((1, 4), dtype=np.int64),
        )

    def extend(self, option: Option, budget: int, first: int, which: int) -> _States | None:
        fits = self.held[:, None] + option.window_need[None, :] <= budget
        fits &= (self.held - self.late)[:, None] + option.forward_need[None, :] <= budget
        rows, choices = np.nonzero(fits)
        if not len(rows):
            return None
        held = self.held[rows] + option.held[choices]
        late = self.late[rows] + option.late[choices]
        seconds = self.seconds[rows] + option.seconds[choices]
        back = np.stack([np.full_like(rows, first), np.full_like(rows, which), choices, rows], axis=1)
        return _States(held, late, seconds, back)

    @classmethod
    def merge(cls, many: list[_States], most: int, quantum: int) -> _States | None:
        if not many:
            return None
        held = np.concatenate([s.held for s in many])
        seconds = np.concatenate([s.seconds for s in many])
        order = np.lexsort((seconds, held))
        lowest = np.minimum.accumulate(seconds[order])
        better = np.ones(len(order), dtype=bool)
        better[1:] = seconds[order][1:] < lowest[:-1] - 1e-15
        order = order[better]
        if len(order) > most:
            # Within one bucket of bytes, the cheapest (the last one in the order) and the lightest (the
            # first) stay.
            bucket = held[order] // quantum
            edge = np.flatnonzero(np.diff(bucket))
            order = order[np.unique(np.concatenate([[0], edge, edge + 1, [len(order) - 1]]))]
        late = np.concatenate([s.late for s in many])
        back = np.concatenate([s.back for s in many])
        return cls(held[order], late[order], seconds[order], back[order])
