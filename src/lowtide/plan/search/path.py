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

_EFFORT = 1200
"""Configurations that are walked through, over all distinct stretches of one length."""

_LONGEST = 2
"""Stages that one stretch has at most; of three and four no plan came out better."""

_LEAST_EFFORT = 24
"""The least for a stretch; with less for each, longer ones are left out."""

_CONFIGURATIONS = 64
"""Configurations that a stretch may choose from."""

_STATES = 60_000
"""States kept over all stages: what a step's stages share."""


@dataclass(frozen=True, eq=False)
class Option:
    """The configurations of stages ``first`` to ``last`` (exclusive), with what they need there.

    Attributes:
        first, last: the stages.
        front: what the search of an alike stretch found.
        events: event ranges of its forward and its window.
        held, need, seconds: per configuration, bytes held beyond its own events, the most live bytes in
            those, and seconds.
    """

    first: int
    last: int
    front: Front
    events: tuple[tuple[int, int], tuple[int, int]]
    held: NDArray[np.int64]
    need: NDArray[np.int64]
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
        self._build()

    def correct(self, path: list[tuple[Option, int]], top: Bytes) -> None:
        """Take over what an exact simulation of ``path`` says about the moments that the model gets wrong."""
        model = self.base.copy()
        for option, choice in path:
            c = option.configurations[choice]
            (fa, fb), (wa, wb) = option.events
            model[fa:fb] += c.profile[: fb - fa]
            model[wa:wb] += c.profile[fb - fa :]
            model[fb:wa] += c.held_bytes
        self.base = self.base + (top - model)
        self.options = [[self._option(o.first, o.last, o.front) for o in here] for here in self.options]

    def restore(self) -> None:
        """Forget the corrections."""
        if self.base is not self.stages.base:
            self.base = self.stages.base
            self.options = [[self._option(o.first, o.last, o.front) for o in here] for here in self.options]

    def _build(self) -> None:
        count, signature = len(self.stages), self.stages.signature
        for length in range(1, min(_LONGEST, count) + 1):
            starts = range(count - length + 1)
            share = _EFFORT // len({signature[first : first + length] for first in starts})
            if length > 1 and share < _LEAST_EFFORT:
                break
            for first in starts:
                # a stage alone may be as long as it is: without it no path reaches the end
                if length == 1 or len(self.stages.operations(first, first + length)) <= LONGEST_SEGMENT:
                    self._add(first, first + length, max(_LEAST_EFFORT, share))

    def _add(self, first: int, last: int, effort: int) -> None:
        key = self.stages.signature[first:last]
        if key not in self.classes:
            segment = Segment(self.sim, self.stages, first, last, self.feasible)
            self.classes[key] = segment.search(effort, _CONFIGURATIONS)
        self.options[first].append(self._option(first, last, self.classes[key]))

    def _option(self, first: int, last: int, front: Front) -> Option:
        stages, graph = self.stages, self.sim.graph
        (fa, fb), (wa, wb) = (
            (stages.forward_events[first][0], stages.forward_events[last - 1][1]),
            (stages.window_events[last - 1][0], stages.window_events[first][1]),
        )
        natural = np.concatenate([self.base[fa:fb], self.base[wa:wb]])
        cost = [
            graph.operations[i].seconds + graph.replay_overhead_seconds
            for i in stages.operations(first, last)
        ]
        return Option(
            first,
            last,
            front,
            ((fa, fb), (wa, wb)),
            np.array([c.held_bytes for c in front.configurations], dtype=np.int64),
            np.array([(natural + c.profile).max(initial=0) for c in front.configurations], dtype=np.int64),
            np.array([sum(cost[k] for k in c.replayed) for c in front.configurations]),
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
        least: list[tuple[int, tuple[int, int, int]] | None] = [None] * (count + 1)
        least[0] = (0, (0, 0, 0))
        for k in range(count):
            here = least[k]
            if here is None:
                continue
            for which, option in enumerate(self.options[k]):
                fits = option.need + here[0] <= budget
                if not fits.any():
                    continue
                held = np.where(fits, option.held, np.iinfo(np.int64).max)
                choice = int(np.argmin(held))
                total, old = here[0] + int(held[choice]), least[option.last]
                if old is None or total < old[0]:
                    least[option.last] = (total, (k, which, choice))
        path: list[tuple[Option, int]] = []
        k = count
        while k:
            here = least[k]
            if here is None:
                return None
            first, which, choice = here[1]
            path.append((self.options[first][which], choice))
            k = first
        return path[::-1]


@dataclass(frozen=True, eq=False)
class _States:
    """Non-dominated (bytes held, seconds), with where each came from: first stage, option, configuration,
    row.
    """

    held: NDArray[np.int64]
    seconds: NDArray[np.float64]
    back: NDArray[np.int64]

    @classmethod
    def start(cls) -> _States:
        return cls(np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros((1, 4), dtype=np.int64))

    def extend(self, option: Option, budget: int, first: int, which: int) -> _States | None:
        rows, choices = np.nonzero(self.held[:, None] + option.need[None, :] <= budget)
        if not len(rows):
            return None
        back = np.stack([np.full_like(rows, first), np.full_like(rows, which), choices, rows], axis=1)
        return _States(
            self.held[rows] + option.held[choices], self.seconds[rows] + option.seconds[choices], back
        )

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
        back = np.concatenate([s.back for s in many])
        return cls(held[order], seconds[order], back[order])
