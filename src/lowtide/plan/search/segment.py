"""What one stretch of stages can do: configurations of stored values, each with its bytes, seconds and memory
profile.

In: a `Simulator`, its `Stages`, and a range of them whose borders are stored. Out: a list of `Configuration`:
the Pareto front that a local search finds. A configuration's effect on memory is exact: it comes from the
simulator's own replay walk. Decisions are made per operation, because an operation that runs again brings all
its outputs back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csc_array

from lowtide.errors import PlanError
from lowtide.plan.simulate.closure import replay_set
from lowtide.plan.simulate.simulator import Bytes, Simulator
from lowtide.plan.split.stages import Stages

_PRICES = (1.0, 0.3, 3.0, 0.1, 10.0, 0.03, 0.55, 1.7, 100.0, 0.003)
"""Prices of a stored byte at which configurations are sought, in units of the segment's own average."""

LONGEST_SEGMENT = 160
"""Most operations of several stages that are searched together; a single stage that cannot be cut may be
longer, and is searched less.
"""

_LP_PRICES = np.geomspace(0.003, 300, 18).tolist()
"""The same for the linear programs that give configurations to begin with."""


@dataclass(frozen=True, eq=False)
class Configuration:
    """One way to run a segment.

    Attributes:
        kept: for every unit of the segment, whether its outputs are stored.
        held_bytes: bytes that it adds to the step's memory from the end of its forward to the beginning of
            its window.
        seconds: what its replays cost.
        replayed: positions, among the segment's operations, of those that run again.
        profile: bytes that it adds at every event of its forward and its window.
        most: most live bytes at its events when nothing else is kept, less those before its forward.
    """

    kept: int
    held_bytes: int
    seconds: float
    replayed: tuple[int, ...]
    profile: Bytes
    most: int


@dataclass(frozen=True, eq=False)
class Front:
    """The configurations of a stretch of stages that no other one beats, in places relative to it: alike
    stretches share them.

    Attributes:
        operations: how many it has.
        units: per unit, its operation's position, and the places of the outputs in question among what that
            writes.
        configurations: bits of ``kept`` are units.
    """

    operations: int
    units: tuple[tuple[int, tuple[int, ...]], ...]
    configurations: list[Configuration]


class Segment:
    """Stages ``first`` to ``last`` (exclusive) of a step, with everything that crosses their borders
    stored.
    """

    def __init__(self, sim: Simulator, stages: Stages, first: int, last: int, feasible: list[bool]) -> None:
        self.sim = sim
        self.feasible = feasible
        self.first, self.last = first, last
        graph = sim.graph
        self.operations = stages.operations(first, last)
        self.position = {index: k for k, index in enumerate(self.operations)}
        self.ranges = (
            (stages.forward_events[first][0], stages.forward_events[last - 1][1]),
            (stages.window_events[last - 1][0], stages.window_events[first][1]),
        )
        made = [w for index in self.operations for w in graph.operations[index].writes]
        self.local = [v for v in made if stages.last_stage[v] < last and v not in stages.everywhere]
        inside = set(self.local)
        self.owned = [
            v
            for v, k in stages.owner.items()
            if first <= k < last and v not in inside and v not in stages.everywhere
        ]
        self.given = [v for v in self.local if v in sim.saved_of]
        self.fixed_hold = {v: sim.saved_hold[v] for v in self.owned if v in sim.saved_of}
        self._find_units(inside, feasible)
        (fa, fb), (wa, wb) = self.ranges
        self.size_forward = fb - fa
        top = stages.base
        before = int(top[fa]) if fa < fb else 0
        self.natural: Bytes = np.concatenate([top[fa:fb], top[wa:wb]]) - before
        """bytes at its events when nothing is kept, less those before it: what stands beside the step makes
        no difference
        """
        self.flags = bytearray(b"\x01" * len(graph.values))
        self.owned_set = {*self.owned, *self.local}
        """Values whose bytes this segment accounts for."""
        self.known: dict[int, Configuration] = {}

    def places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Per unit, its position and the places of its outputs among what it writes."""
        writes = {index: self.sim.graph.operations[index].writes for index in self.units}
        return tuple(
            (self.position[i], tuple(writes[i].index(w) for w in self.outputs[i])) for i in self.units
        )

    def _find_units(self, inside: set[int], feasible: list[bool]) -> None:
        """The operations whose outputs may be stored or not, and those without a choice."""
        graph, sim = self.sim.graph, self.sim
        needed = replay_set(
            self.given, sim.producer, [op.reads for op in graph.operations], lambda u: u not in inside
        )
        self.units: list[int] = []
        self.outputs: dict[int, list[int]] = {}
        self.always: list[int] = []
        self.never: list[int] = []
        for index in sorted(needed):
            outputs: list[int] = []
            for w in graph.operations[index].writes:
                if w not in inside:
                    continue
                value = graph.values[w]
                if not feasible[index] or value.must_store:
                    if value.storable or w in sim.saved_of:
                        self.always.append(w)
                    else:
                        self.never.append(w)
                elif not value.storable:
                    self.never.append(w)
                elif sim.natural_end[value.storage] >= sim.end:
                    self.always.append(w)
                elif w in sim.saved_of or any(i in needed for i in sim.readers[w]):
                    outputs.append(w)
            if outputs:
                self.units.append(index)
                self.outputs[index] = outputs

    def stored_values(self, kept: int) -> list[int]:
        """The values that a configuration stores, borders aside."""
        return [
            v for k, index in enumerate(self.units) if kept >> k & 1 for v in self.outputs[index]
        ] + self.always

    def evaluate(self, kept: int) -> Configuration:
        """The configuration that stores the outputs of the units in ``kept`` (a bit each)."""
        if kept not in self.known:
            self.known[kept] = self._walk(kept)
        return self.known[kept]

    def _seconds(self, running: Iterable[int]) -> float:
        graph = self.sim.graph
        return sum(graph.operations[i].seconds + graph.replay_overhead_seconds for i in running)

    def _walk(self, kept: int) -> Configuration:
        sim, flags = self.sim, self.flags
        for v in self.never:
            flags[v] = 0
        for k, index in enumerate(self.units):
            flag = kept >> k & 1
            for v in self.outputs[index]:
                flags[v] = flag
                if flag and v in sim.companions:
                    for earlier in sim.companions[v]:
                        flags[earlier] = 2
        try:
            replay = sim.replay([v for v in self.given if not flags[v]], flags)
        except PlanError:
            # A replay reads a version that the step overwrites: such versions are given up here.
            for v in self.never:
                flags[v] = 0
            replay = sim.replay([v for v in self.given if not flags[v]], flags)
        hold: dict[int, int] = {}
        storage_of = sim.storage_of
        for v in self.given:
            if flags[v]:
                self._longer(hold, storage_of[v], sim.saved_hold[v])
        for v, until in self.fixed_hold.items():
            self._longer(hold, storage_of[v], until)
        owned = self.owned_set
        for v, until in replay.hold.items():
            if v in owned:
                self._longer(hold, storage_of[v], until)
        held, profile = self._profile(hold, replay.level, replay.tops)
        return Configuration(
            kept,
            held,
            self._seconds(replay.running),
            tuple(self.position[i] for i in replay.running),
            profile,
            int((self.natural + profile).max(initial=0)),
        )

    @staticmethod
    def _longer(hold: dict[int, int], sid: int, until: int) -> None:
        if until > hold.get(sid, -1):
            hold[sid] = until

    def _profile(
        self, hold: dict[int, int], level: list[tuple[int, int]], tops: list[tuple[int, int, int]]
    ) -> tuple[int, Bytes]:
        sim = self.sim
        (fa, fb), (wa, wb) = self.ranges
        split = self.size_forward
        change = [0] * (split + (wb - wa) + 1)
        held = 0
        storages = sim.graph.storages
        for sid, until in hold.items():
            start = sim.natural_end[sid]
            if start >= until:
                continue
            size = storages[sid].bytes
            if start < wa:
                held += size
            change[min(max(start, fa), fb) - fa if start < wa else min(start - wa, wb - wa) + split] += size
            change[split + min(max(until, wa), wb) - wa] -= size
        copies = [0] * (wb - wa + 1)
        for event, size in level:
            at = min(max(event, wa), wb) - wa
            change[split + at] += size
            copies[at] += size
        profile = np.array(list(accumulate(change[:-1])), dtype=np.int64)
        if tops:
            after = list(accumulate(copies))
            for event, most, _ in tops:
                if wa <= event < wb:
                    k = event - wa
                    profile[split + k] += max(0, most - after[k])
        return held, profile

    def search(self, effort: int, most: int) -> Front:
        """Look for good configurations with at most about ``effort`` evaluations: the Pareto front of what
        was seen, at most ``most``.
        """
        count = len(self.units)
        everything = (1 << count) - 1
        first = self.evaluate(everything)
        last = self.evaluate(0)
        if count and (1 << count) <= min(effort, 1 << 9):
            for kept in range(1 << count):
                self.evaluate(kept)
        elif count:
            span = max(1, first.held_bytes - last.held_bytes)
            price = max(last.seconds - first.seconds, 1e-12) / span
            most_known = effort if len(self.operations) > LONGEST_SEGMENT else 1 << 30
            for seed in self._relaxed([f * price for f in _LP_PRICES]):
                self.evaluate(seed)
            for transient, pairs in ((0.0, False), (1.0, True), (0.3, False), (4.0, True), (0.0, True)):
                for factor in _PRICES:
                    if len(self.known) > effort:
                        break
                    self._descend(factor * price, transient * factor * price, pairs, most_known)
        return Front(len(self.operations), self.places(), self.front(most))

    def _relaxed(self, prices: list[float]) -> list[int]:
        """The best configurations when each stored byte costs a price and the window's peak is free: a linear
        program each.
        """
        graph, sim = self.sim.graph, self.sim
        inside = set(self.local)
        operations = sorted(
            {*self.units, *(sim.producer[v] for v in self.never if sim.producer[v] in self.position)}
        )
        column = {i: k for k, i in enumerate(operations)}
        unit = {i: len(operations) + k for k, i in enumerate(self.units)}
        rows: list[tuple[list[int], list[float], float]] = []

        def recovered(value: int, columns: list[int], signs: list[float], right: float) -> None:
            index = sim.producer[value]
            if index not in column:
                return
            columns, signs = [*columns, column[index]], [*signs, -1.0]
            if index in unit and value in self.outputs[index]:
                columns, signs = [*columns, unit[index]], [*signs, -1.0]
            rows.append((columns, signs, right))

        stored_anyway = set(self.always)
        for v in self.given:
            if v not in stored_anyway and sim.unpacked[v]:
                recovered(v, [], [], -1.0)
        for i in operations:
            for u in graph.operations[i].reads:
                if u in inside and u not in stored_anyway:
                    recovered(u, [column[i]], [1.0], 0.0)
        if not rows:
            return []
        total = len(operations) + len(self.units)
        down = [k for k, (columns, _, _) in enumerate(rows) for _ in columns]
        across = [c for columns, _, _ in rows for c in columns]
        matrix = csc_array(
            ([x for _, signs, _ in rows for x in signs], (down, across)), shape=(len(rows), total)
        )
        right: Any = np.array([r for _, _, r in rows])
        none: Any = -np.inf
        zero: Any = 0
        one: Any = 1
        limits, between = LinearConstraint(matrix, none, right), Bounds(zero, one)
        cost = np.zeros(total)
        size = np.zeros(total)
        for i in operations:
            cost[column[i]] = graph.operations[i].seconds + graph.replay_overhead_seconds
        for i in self.units:
            size[unit[i]] = sum(sim.value_bytes[v] for v in self.outputs[i])
        scale = 1.0 / max(cost.max(), 1e-12)

        def solved(price: float) -> int | None:
            answer = milp(
                (cost + price * size) * scale, constraints=limits, bounds=between, options={"presolve": False}
            )
            if answer.status != 0 or answer.x is None:
                return None
            return sum(1 << k for k, i in enumerate(self.units) if answer.x[unit[i]] > 0.5)

        return distinct_answers(solved, prices)

    def _descend(self, price: float, transient: float, pairs: bool, most_known: int) -> int:
        """First-improvement descent by flips, then by pairs of flips, from the best of what is known, until
        ``most_known`` are known.
        """
        count = len(self.units)
        known, evaluate = self.known, self.evaluate
        kept, best = self._best(price, transient)
        moves = [1 << k for k in range(count)]
        if pairs:
            moves += [1 << i | 1 << j for i in range(count) for j in range(i + 1, min(count, i + 4))]
        quiet = at = 0
        total = len(moves)
        while quiet < total and len(known) <= most_known:
            other = kept ^ moves[at]
            at = (at + 1) % total
            c = known.get(other) or evaluate(other)
            score = c.seconds + price * c.held_bytes + transient * c.most
            quiet += 1
            if score < best - 1e-15:
                kept, best, quiet = other, score, 0
        return kept

    def _best(self, price: float, transient: float) -> tuple[int, float]:
        """The best of what is known, at prices of a held byte and of a byte at the peak, and its score."""
        rows = np.array([(c.seconds, c.held_bytes, c.most) for c in self.known.values()])
        scores = rows[:, 0] + price * rows[:, 1] + transient * rows[:, 2]
        best = float(scores.min())
        alike = np.flatnonzero(scores == best).tolist()
        kept = list(self.known)
        return min(kept[k] for k in alike), best

    def front(self, most: int) -> list[Configuration]:
        """The configurations that no other one beats in held bytes, seconds and peak; of more than ``most``
        every so many.
        """
        everyone = sorted(self.known.values(), key=lambda c: (c.seconds, c.held_bytes, c.most, c.kept))
        table = np.array([(c.held_bytes, c.most) for c in everyone], dtype=np.int64)
        chosen: list[int] = []
        for k in range(len(everyone)):
            if not (table[chosen] <= table[k]).all(axis=1).any():
                chosen.append(k)
        if len(chosen) > most:
            chosen = [chosen[k * (len(chosen) - 1) // (most - 1)] for k in range(most)]
        return [everyone[k] for k in chosen]


def distinct_answers(solved: Callable[[float], int | None], prices: list[float]) -> list[int]:
    """The different answers at ``prices``, which rise. What is best at two prices is best at every price in
    between: both costs are linear.
    """
    answers = {at: solved(prices[at]) for at in (0, len(prices) - 1)}
    open_ = [(0, len(prices) - 1)]
    while open_:
        low, high = open_.pop()
        if high - low > 1 and (answers[low] is None or answers[low] != answers[high]):
            middle = (low + high) // 2
            answers[middle] = solved(prices[middle])
            open_ += [(low, middle), (middle, high)]
    return list(dict.fromkeys(answer for _, answer in sorted(answers.items()) if answer is not None))
