"""Recompute and move together: the least extra time within a budget when values may also be offloaded,
compressed or sharded.

The linear program of `lowtide.plan.bound.moving` says which values to keep, recompute or move at best, and
how little extra time any such schedule can have. Its decisions are made whole and simulated exactly,
transfers with a clock; what exceeds the budget is asked of the program once more. Beside these stand, for
a range of
larger budgets, what the recomputing planner keeps with as few values of it moved as will do; recomputing
alone and moving alone are among them, so the mix is never worse than either. In the best of all, single
decisions are exchanged at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan.bound.moving import MovingRelaxation
from lowtide.plan.bound.program import Floats
from lowtide.plan.bound.relaxation import Bound
from lowtide.plan.data import Codec, Compress, Links, Moved, Moving, Shard, stages
from lowtide.plan.moves.movable import default_window, least_count
from lowtide.plan.moves.placements import Placements
from lowtide.plan.moves.supply import codec_named
from lowtide.plan.search.planner import Planner
from lowtide.plan.simulate.refusal import refusal
from lowtide.plan.simulate.simulator import Simulation, Simulator, close

_POINTS = 3
"""Budgets between the real one and the plain step's peak for which recomputation is planned."""

_ROUNDS = 6
"""Times that the program is asked: for less by what its decisions exceeded the budget, then for something
between what fits and what does not.
"""

_CLOSE = 0.01
"""How close to each other these two get, as a share of the budget."""

_STARTS = 2
"""Mixes of either kind in which single decisions are exchanged."""

_TRIES = 120
"""Exchanges of single decisions."""

_WHOLE_COLUMNS = 1200
"""Largest program that is solved in whole numbers."""

_ROUNDINGS = (0.0, 0.9)
"""How much of a value the program has to move for it to move."""

_GOOD_GAP = 0.003


@dataclass(frozen=True)
class Mix:
    """What is stored and what moves, simulated exactly.

    Attributes:
        stored: values that stay on the device.
        moves: values that move, and how.
        window: bytes that may be under way in each direction.
        simulation: what that does.
    """

    stored: frozenset[int]
    moves: dict[int, Moved] = field(repr=False)
    window: int
    simulation: Simulation

    @property
    def key(self) -> tuple[float, int]:
        """What makes a mix better: seconds first, then bytes."""
        return (self.simulation.extra_seconds, self.simulation.peak_bytes)

    @property
    def decisions(self) -> dict[int, Moving]:
        """Value -> where it goes."""
        return {v: m.decision for v, m in self.moves.items()}


@dataclass(frozen=True)
class Exchange:
    """One decision made otherwise: values to store, values that come back from where they moved, values to
    move.
    """

    stored: tuple[int, ...]
    back: tuple[int, ...]
    moves: dict[int, Moved]


class Mixer:
    """Plans one step graph whose values may move.

    Args:
        planner: the step, with the planner that recomputes.
        ways: see `lowtide.plan.moves.placements.placements_of`.
        links: speeds of the tiers and groups.
        window_bytes: the most that is under way at one time in each direction; ``None`` to choose.
        codecs: codecs of the user's own.
    """

    def __init__(
        self,
        planner: Planner,
        ways: Placements,
        links: Links,
        window_bytes: int | None,
        codecs: Sequence[Codec] = (),
    ) -> None:
        self.planner = planner
        self.graph: StepGraph = planner.graph
        self.sim: Simulator = planner.sim
        self.ways = ways
        self.links = links
        self.codecs = tuple(codecs)
        travelling = [v for v, rows in ways.items() if any(m.tier for m in rows)]
        largest = max((self.sim.value_bytes[v] for v in travelling), default=1)
        some = default_window(self.sim, travelling)
        sharded = any(isinstance(stages(m.decision)[0], Shard) for rows in ways.values() for m in rows)
        # is gathered ahead: a gather takes the whole value, where the peak may stand
        nothing = {1} if sharded else set[int]()
        self.windows = [window_bytes] if window_bytes else sorted({largest, some} | nothing)
        self.relaxation = MovingRelaxation(self.sim, ways, links, planner.stages, self._whole)
        self.best_placement = {v: min(rows, key=self._costs) for v, rows in ways.items()}
        """the way that is taken where one value is moved by itself"""
        self.bounds: dict[int, float] = {}
        """budget -> seconds that no schedule can undercut, the recording overhead aside"""

    def _costs(self, m: Moved) -> float:
        """Seconds that moving takes, as if nothing hid the transfer."""
        link = self.links.get(m.tier) if m.tier else None
        both = (
            m.encoded_bytes * (1 / link.write_bytes_per_second + 1 / link.read_bytes_per_second)
            if link
            else 0.0
        )
        return self.relaxation.seconds_to_move(m) + both

    def _whole(self, codec: str) -> bool:
        return codec_named(codec, self.codecs).replayable_from

    def _saves(self, m: Moved) -> int:
        """Bytes that moving a value frees on the device."""
        return max(1, m.bytes - (0 if m.tier else m.encoded_bytes))

    def candidate(self, stored: frozenset[int], moves: Mapping[int, Moved], window: int) -> Mix:
        """``stored`` and ``moves``, closed and simulated; what a replay reads stays where its codec does not
        bring all of it back.
        """
        kept = close(self.graph, stored | moves.keys(), self.sim)
        going = {v: m for v, m in moves.items() if v in kept}
        kept -= going.keys()
        sim = self.sim.moving(list(going.values()), window) if going else self.sim
        simulation = sim.simulate(kept, self.links)
        partial = {
            v
            for v, m in going.items()
            if isinstance(first := stages(m.decision)[0], Compress) and not self._whole(first.codec)
        }
        read = {u for i in simulation.replayed for u in self.graph.operations[i].reads} if partial else set()
        if partial & read:
            return self.candidate(
                stored | (partial & read), {v: m for v, m in going.items() if v not in read & partial}, window
            )
        return Mix(kept, going, window, simulation)

    def solve(self, budget: int) -> tuple[Mix, dict[str, float]]:
        """The best mix found within ``budget``, and the extra seconds of recomputing alone and of moving
        alone where they fit.

        Raises:
            BudgetError: none fits; the error carries the smallest budget that a mix can meet.
        """
        found: list[Mix] = []
        alone: dict[str, float] = {}
        for stored, top in self._recomputing(budget):
            mix = self._fewest(stored, budget)
            if mix is None:
                continue
            found.append(mix)
            if not mix.moves:
                alone["recomputing alone"] = min(
                    alone.get("recomputing alone", np.inf), mix.simulation.extra_seconds
                )
            elif top and not mix.simulation.replayed:
                alone["moving alone"] = mix.simulation.extra_seconds
        starts = sorted(found, key=lambda mix: mix.key)[:_STARTS]
        starts += sorted(self._from_program(budget), key=lambda mix: mix.key)[:_STARTS]
        if not starts:
            least = self.least()
            if least.simulation.peak_bytes > budget:
                raise refusal(self.sim, least.simulation, budget)
            starts.append(least)
        best = min(starts, key=lambda mix: mix.key)
        if best.simulation.extra_seconds - self._floor(budget) > _GOOD_GAP * self.graph.plain_seconds:
            best = min((self._polish(start, budget) for start in starts), key=lambda mix: mix.key)
        return best, alone

    def bound(self, budget: int) -> Bound:
        """Lower bounds for ``budget`` on any schedule that moves values only in the ways that were
        offered.
        """
        if budget >= self.sim.plain_peak:
            return Bound(0.0, self.relaxation.least_peak())
        return Bound(self._floor(budget), self.relaxation.least_peak())

    def _floor(self, budget: int) -> float:
        """Seconds that no schedule can undercut."""
        if budget not in self.bounds:
            self.bounds[budget] = self.relaxation.solve(budget)[0]
        return self.bounds[budget] + self.graph.overhead_seconds

    def least(self) -> Mix:
        """The mix with the smallest peak that is found: all that may move does, and the rest is what the
        recomputing planner finds least with.
        """
        family = self.planner.family()
        sets = {c.stored for c in [*family, self.planner.smallest]}
        smallest = {
            v: min(rows, key=lambda m: (0 if m.tier else m.encoded_bytes, self._costs(m)))
            for v, rows in self.ways.items()
        }
        found = []
        for stored in sets:
            going = {v: m for v, m in smallest.items() if v in stored}
            found += [
                self.candidate(stored, moves, window) for moves in ({}, going) for window in self.windows
            ]
        return min(found, key=lambda mix: (mix.simulation.peak_bytes, mix.simulation.extra_seconds))

    # ---- candidates ------------------------------------------------------------------------------

    def _recomputing(self, limit: int) -> Iterator[tuple[frozenset[int], bool]]:
        """What the cheapest recomputation stores, from the real budget up to the plain step; and whether it
        is that.
        """
        top = self.sim.plain_peak
        for k in range(_POINTS):
            try:
                yield self.planner.solve(limit + (top - limit) * k // _POINTS).stored, False
            except BudgetError:
                continue
        yield close(self.graph, self.sim.droppable, self.sim), True

    def _fewest(self, stored: frozenset[int], budget: int) -> Mix | None:
        """As few of ``stored`` as will do, the earliest of the forward first, moved; ``None`` where all of
        them do not do.
        """
        mine = [v for v in self.ways if v in stored]
        found: list[Mix] = []
        for window in self.windows:

            def moved(count: int, window: int = window) -> Mix:
                return self.candidate(stored, {v: self.best_placement[v] for v in mine[:count]}, window)

            count = least_count(
                len(mine), lambda count, moved=moved: moved(count).simulation.peak_bytes <= budget
            )
            if count is not None:
                found.append(moved(count))
            if count == 0:
                break
        return min(found, key=lambda mix: mix.key, default=None)

    def _from_program(self, budget: int) -> list[Mix]:
        """Mixes from the program's decisions, made whole."""
        relaxation = self.relaxation
        found: list[Mix] = []
        for window in self.windows:
            target, fits, exceeds = budget, 0, 0
            for attempt in range(_ROUNDS):
                bound, point = relaxation.solve(target)
                if target == budget:
                    self.bounds[budget] = bound
                if bound == float("inf"):
                    break
                points = [(point, relaxation.moved)]
                if not attempt and len(relaxation.program.cost) <= _WHOLE_COLUMNS:
                    good = _GOOD_GAP * self.graph.plain_seconds
                    _, whole = relaxation.solve_whole(target, 0.2 * good / max(bound, good))
                    if whole is not None:
                        points.append((whole, relaxation.moved))
                trials = [
                    self.candidate(*self._rounded(*decisions, least), window)
                    for decisions in points
                    for least in _ROUNDINGS
                ]
                fitting = [mix for mix in trials if mix.simulation.peak_bytes <= budget]
                found += fitting
                if fitting:
                    fits = target
                else:
                    exceeds = target
                if not exceeds or (fits and exceeds - fits < _CLOSE * budget):
                    break
                over = min(mix.simulation.peak_bytes for mix in trials) - budget
                target = (fits + exceeds) // 2 if fits else target - over
        return found

    def _rounded(self, point: Floats, moved: Floats, least: float) -> tuple[frozenset[int], dict[int, Moved]]:
        """What is stored and what moves when each value does what most of it does, and moves if that is at
        least ``least`` of it.
        """
        relaxation = self.relaxation
        stored = set[int]()
        moves: dict[int, Moved] = {}
        share = dict[int, tuple[float, Moved]]()
        for k, m in enumerate(relaxation.rows):
            if moved[k] > share.get(m.value, (0.0, m))[0]:
                share[m.value] = (float(moved[k]), m)
        for v in relaxation.values:
            keep = float(point[relaxation.column[v]])
            replay = relaxation.replay_column(v)
            again = float(point[replay]) if replay is not None else 0.0
            move, m = share.get(v, (0.0, None))
            if m is not None and move >= least and move > keep and move >= again:
                moves[v] = m
            elif keep > 0.5 or (v in self.sim.saved_of and keep >= again):
                stored.add(v)
        return frozenset(stored), moves

    def _exchanges(self, mix: Mix) -> list[Exchange]:
        """Single decisions that would save time, what promises most seconds a byte first."""
        graph, sim = self.graph, self.sim
        found: list[tuple[float, Exchange]] = []
        cheapest = sorted(
            (self.best_placement[v] for v in self.ways if v in mix.stored),
            key=lambda m: self._costs(m) / self._saves(m),
        )
        for v, m in mix.moves.items():
            rate = self._costs(m) / sim.value_bytes[v]
            found += [(rate, Exchange((v,), (v,), {})), (rate, Exchange((), (v,), {}))]
        for index in mix.simulation.replayed:
            op = graph.operations[index]
            outputs = tuple(
                w
                for w in op.writes
                if graph.values[w].storable and w not in mix.stored and w not in mix.moves
            )
            if not outputs:
                continue
            gain = op.seconds + graph.replay_overhead_seconds
            rate = gain / max(1, sum(sim.value_bytes[w] for w in outputs))
            found.append((rate, Exchange(outputs, (), {})))
            room, made = sum(sim.value_bytes[w] for w in outputs), dict[int, Moved]()
            for m in cheapest:  # what moves instead makes room
                if room <= 0:
                    break
                if m.value not in outputs:
                    made[m.value] = m
                    room -= self._saves(m)
            if room <= 0 and gain > sum(map(self.relaxation.seconds_to_move, made.values())):
                found.append((rate, Exchange(outputs, (), made)))
            going = {w: self.best_placement[w] for w in outputs if w in self.best_placement}
            if len(going) == len(outputs) and gain > sum(
                map(self.relaxation.seconds_to_move, going.values())
            ):
                found.append((rate, Exchange((), (), going)))
        return [exchange for _, exchange in sorted(found, key=lambda row: -row[0])]

    def _polish(self, best: Mix, budget: int) -> Mix:
        """Exchange single decisions; the exact simulation decides each."""
        tries, improved = _TRIES, True
        while improved:
            improved = False
            for exchange in self._exchanges(best):
                if tries <= 0:
                    return best
                tries -= 1
                moves = {v: m for v, m in best.moves.items() if v not in exchange.back} | exchange.moves
                other = self.candidate(best.stored.union(exchange.stored), moves, best.window)
                if other.simulation.peak_bytes <= budget and other.key < best.key:
                    best, improved = other, True
        return best
