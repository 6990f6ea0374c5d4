"""The policy that searches among all that may happen to a value: mixed, which recomputes and moves together.

`MixedSearch` finds the least extra time within a budget when values may also be offloaded, compressed or
sharded. The linear program of `lowtide.plan.bound` says which values to keep, recompute or move at best, and
how little extra time any such schedule can have. Its decisions are made whole and simulated exactly,
transfers with a clock; where they exceed the budget the linear program is solved once more, for less. Beside
these it tries, for a range of larger budgets, what the recomputing planner keeps with as few values of it
moved as will do; recomputing alone and moving alone are among them, so the mix is never worse than either. In
the best of all, single decisions are exchanged at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lowtide.errors import BudgetError, PlanError, expect
from lowtide.extensions.moves.bound import MovingRelaxation
from lowtide.extensions.moves.by_rule import check_moves
from lowtide.extensions.moves.layout import ALIGN
from lowtide.extensions.moves.placements import (
    Codec,
    Placements,
    close_with_moves,
    default_placements,
    default_window,
    least_count,
    missing_links,
    placements_of,
)
from lowtide.extensions.moves.plans import make_plan
from lowtide.extensions.moves.simulate import with_moves
from lowtide.graph import StepGraph
from lowtide.plan.bound import A_COLUMN, A_SECOND, Bound, Effort, Floats
from lowtide.plan.data import Links, Move, Moving, Plan, decision_of, form_and_tier
from lowtide.plan.local_search import Candidate
from lowtide.plan.policies.build import Policy
from lowtide.plan.policies.chosen import ENDED_EARLY, obey_scopes
from lowtide.plan.search import Search, search_of
from lowtide.words import format_bytes

_POINTS = 3
"""Budgets between the real one and the plain step's peak for which recomputation is planned."""

_ROUNDS = 6
"""How often the linear program is solved: each time for less, by what its decisions exceeded the budget, and
once some fit, between the largest target that fits and the smallest that does not.
"""

_CLOSE = 0.01
"""Distance between these two targets, as a share of the budget, below which no other is tried."""

_STARTS = 2
"""How many of the best mixes from recomputing, and from the linear program, have decisions exchanged."""

_TRIES = 120
"""How many exchanges of single decisions are tried."""

_WHOLE_COLUMNS = 1200
"""Columns of the largest linear program that is solved in whole numbers."""

_ROUNDINGS = (0.0, 0.9)
"""Shares of a value that the linear program has to move for the value to move: each is tried."""

_GOOD_GAP = 0.003

_SOLUTIONS = 8
"""For how many solutions of the linear program there has to be time left, else it is not solved at all."""


class Exchange(NamedTuple):
    """One decision made otherwise: values to store, values that come back from where they moved, values to
    move.
    """

    stored: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()


class MixedSearch:
    """Plans one step graph whose values may move.

    Args:
        search: the step, with the search that recomputes.
        placements: see `lowtide.extensions.moves.placements.placements_of`.
        links: speeds of the tiers and groups.
        window_bytes: the most that is under way at one time in each direction; ``None`` to choose.
        seconds: about how long to search, counted in work that is done; ``None`` for as long as it takes.
        host_bytes: the most that moves to main memory; ``None`` for no limit.
    """

    def __init__(
        self,
        search: Search,
        placements: Placements,
        links: Links,
        window_bytes: int | None,
        seconds: float | None = None,
        host_bytes: int | None = None,
    ) -> None:
        self.seconds, self.host_bytes = seconds, host_bytes
        self.effort = Effort(math.inf if seconds is None else seconds * A_SECOND)
        self.search, self.placements, self.links = search, placements, links
        self.graph, self.sim = search.graph, search.sim
        travelling = [v for v, rows in placements.items() if any(m.tier for m in rows)]
        largest = max((self.sim.value_bytes[v] for v in travelling), default=1)
        some = default_window(self.sim, travelling)
        # 1: nothing is gathered ahead; a gather takes the whole value, perhaps at the peak
        nothing = {1} if any(m.shard for rows in placements.values() for m in rows) else set[int]()
        self.windows = [window_bytes] if window_bytes else sorted({largest, some} | nothing)
        self.relaxation = MovingRelaxation(self.sim, placements, links, self.effort, host_bytes)
        self.best_placement = {v: min(rows, key=self._costs) for v, rows in placements.items()}
        """the way that is taken where one value is moved by itself"""

    def _costs(self, m: Move) -> float:
        """Seconds that moving takes, as if nothing hid the transfer."""
        link = self.links.get(m.tier)
        transfer = link.there_and_back(m.encoded_bytes) if link else 0.0
        return self.relaxation.seconds_to_move(m) + transfer

    def _saves(self, m: Move) -> int:
        """Bytes that moving a value frees on the device."""
        return max(1, m.bytes - (0 if m.tier else m.encoded_bytes))

    def _within_host(self, moves: Iterable[Move]) -> list[Move]:
        """Of some moves, in their order, those for which main memory has room."""
        left, found = math.inf if self.host_bytes is None else self.host_bytes, list[Move]()
        for m in moves:
            size = host_bytes_of(m)
            if size <= left:
                left -= size
                found.append(m)
        return found

    def fits(self, mix: Candidate, budget: int) -> bool:
        """Whether a mix is within the budget, and what it moves to main memory within that of the host."""
        most = math.inf if self.host_bytes is None else self.host_bytes
        return mix.simulation.peak_bytes <= budget and sum(map(host_bytes_of, mix.moves.values())) <= most

    def candidate(self, stored: frozenset[int], moves: Iterable[Move], window: int) -> Candidate:
        """``stored`` and ``moves``, closed and simulated."""
        kept, going = close_with_moves(self.sim, stored, moves)
        simulation = self.sim.simulate(kept, with_moves(self.sim, going.values(), window, self.links))
        self.effort.note(len(self.graph.operations))
        return Candidate(kept, simulation, going, window)

    def solve(self, budget: int) -> Candidate:
        """The best mix found within ``budget``.

        Raises:
            BudgetError: none fits; the error carries the smallest budget that a mix can meet.
        """
        starts: list[Candidate] = []
        if self.seconds is not None:
            found = self._soon(budget, self.seconds / 2)
            starts.append(found if found.window else replace(found, window=self.windows[-1]))
            self.effort.note(self.search.effort.spent)
        starts += sorted(self._from_recomputing(budget), key=lambda mix: mix.key)[:_STARTS]
        if starts and not self.has_time:
            return min(starts, key=lambda mix: mix.key)
        starts += sorted(self._from_linear_program(budget), key=lambda mix: mix.key)[:_STARTS]
        if not starts:
            least = self.least()
            if least.simulation.peak_bytes > budget:
                raise self.sim.refusal(least.simulation, budget)
            starts.append(least)
        best = min(starts, key=lambda mix: mix.key)
        gap = best.simulation.extra_seconds - self.relaxation.bound(budget).extra_seconds
        if gap > _GOOD_GAP * self.graph.plain_seconds:
            best = min((self._polish(start, budget) for start in starts), key=lambda mix: mix.key)
        return best

    @property
    def has_time(self) -> bool:
        """Whether there is time left to solve the linear program."""
        solution = A_COLUMN * len(self.relaxation.linear_program.cost)
        return self.effort.limit - self.effort.spent >= _SOLUTIONS * solution

    def _soon(self, budget: int, seconds: float) -> Candidate:
        """A mix that is found in about so many seconds: what recomputing alone finds within ``budget``, else
        the one with the smallest peak.

        Raises:
            BudgetError: that does not fit either.
        """
        with suppress(BudgetError):
            return self.search.solve(budget, seconds, at_once=True)
        least = self.least()
        if least.simulation.peak_bytes > budget:
            raise self.sim.refusal(least.simulation, budget)
        return least

    def least(self, in_time: bool = False) -> Candidate:
        """The mix with the smallest peak that is found: of the sets of stored values with the smallest peaks,
        either all values that may move do, or none.

        Args:
            in_time: whether the search for the smallest peak ends after ``seconds``.
        """
        search = self.search
        lowest = search.lowest_within(self.seconds) if in_time and self.seconds else search.smallest
        sets = {c.stored for c in [*search.baselines, lowest]}
        smallest = {
            v: min(rows, key=lambda m: (0 if m.tier else m.encoded_bytes, self._costs(m)))
            for v, rows in self.placements.items()
        }
        found = []
        for stored in sets:
            going = self._within_host(m for v, m in smallest.items() if v in stored)
            found += [
                self.candidate(stored, moves, window) for moves in ([], going) for window in self.windows
            ]
        return min(found, key=lambda mix: (mix.simulation.peak_bytes, mix.simulation.extra_seconds))

    # ---- candidates ------------------------------------------------------------------------------

    def _from_recomputing(self, budget: int) -> Iterator[Candidate]:
        """Mixes that move values which recomputing alone stores, for budgets from the real one up to the
        plain step's peak, or by what may move, and no more of them than needed to fit: those that the links
        carry beside the forward before others, and the earliest values of the forward.
        """
        wishes = [self.sim.close(self.sim.all_stored)]
        budgets = self._larger(budget)
        for larger in budgets:
            if self.effort.over:
                break
            share = None if self.seconds is None else self.seconds / (4 * len(budgets))
            with suppress(BudgetError):
                wishes.append(self.search.solve(larger, share).stored)
                self.effort.note(self.search.effort.spent)
        for stored in wishes:
            first = self._within_host(self.best_placement[v] for v in self.placements if v in stored)
            for mine in (self._in_pace(first), first):
                for window in self.windows:

                    def moved(count: int, stored=stored, mine=mine, window=window) -> Candidate:
                        return self.candidate(stored, mine[:count], window)

                    count = least_count(
                        len(mine), lambda n, moved=moved: moved(n).simulation.peak_bytes <= budget
                    )
                    if count is not None:
                        yield moved(count)
                    if count == 0 or self.effort.over:  # other windows are the same then
                        break

    def _larger(self, budget: int) -> list[int]:
        """Budgets from the real one up to the plain step's peak, and up to what the links carry beside the
        forward; nothing that moves makes more room than main memory has.
        """
        more, forward = self.sim.plain_peak - budget, self._clock[self.sim.first_unpack - 1]
        if self.host_bytes is not None:
            more = min(more, self.host_bytes)
        beside = int(sum(link.write_bytes_per_second for link in self.links.values()) * forward)
        steps = [more * k // _POINTS for k in range(_POINTS)]
        if beside < more:
            steps += [beside * k // _POINTS for k in range(1, _POINTS + 1)]
        return [budget + step for step in sorted(set(steps))]

    @cached_property
    def _clock(self) -> Floats:
        """Seconds of the plain step up to each event, and with it."""
        operations = self.graph.operations
        return np.cumsum([operations[k].seconds if kind == "op" else 0.0 for kind, k in self.graph.events])

    def _in_pace(self, moves: Sequence[Move]) -> list[Move]:
        """Moves in the order of the forward, in another order: first those that their links carry at once,
        each when it is made.
        """
        free, paced, late = dict[str, float](), list[Move](), list[Move]()
        for m in moves:
            link = self.links.get(m.tier)
            now = float(self._clock[self.sim.op_event[self.sim.producer[m.value]]])
            if link is None or free.get(m.tier, 0.0) <= now:
                free[m.tier] = now + (link.seconds_out(m.encoded_bytes) if link else 0.0)
                paced.append(m)
            else:
                late.append(m)
        return [*paced, *late]

    def _from_linear_program(self, budget: int) -> list[Candidate]:
        """Mixes from the linear program's decisions, made whole."""
        relaxation = self.relaxation
        found: list[Candidate] = []
        for window in self.windows:
            target, fits, exceeds = budget, 0, 0
            for attempt in range(_ROUNDS):
                bound, point = relaxation.solve(target)
                if bound == float("inf"):
                    break
                points = [point]
                if (
                    not attempt
                    and not self.effort.over
                    and len(relaxation.linear_program.cost) <= _WHOLE_COLUMNS
                ):
                    good = _GOOD_GAP * self.graph.plain_seconds
                    _, whole = relaxation.solve_whole(target, 0.2 * good / max(bound, good))
                    points += [] if whole is None else [whole]
                trials = [
                    self.candidate(kept, self._within_host(moves), window)
                    for decisions in points
                    for least in _ROUNDINGS
                    for kept, moves in (self._round(decisions, least),)
                ]
                over = min(mix.simulation.peak_bytes for mix in trials) - budget
                found += [mix for mix in trials if self.fits(mix, budget)]
                fits, exceeds = (target, exceeds) if over <= 0 else (fits, target)
                close = not exceeds or (fits and exceeds - fits < _CLOSE * budget)
                if close or self.effort.over:
                    break
                target = (fits + exceeds) // 2 if fits else target - over
        return found

    def _round(self, point: Floats, least: float) -> tuple[frozenset[int], list[Move]]:
        """What is stored and what moves when each value does what most of it does, and moves if that is at
        least ``least`` of it.
        """
        relaxation = self.relaxation
        stored, moves = set[int](), list[Move]()
        share: dict[int, tuple[float, Move]] = {}
        for k, m in enumerate(relaxation.moves, relaxation.first_move):
            if point[k] > share.get(m.value, (0.0, m))[0]:
                share[m.value] = (float(point[k]), m)
        for v in relaxation.values:
            keep = float(point[relaxation.column[v]])
            again = sum(float(point[column]) for column, _ in relaxation.replays_of(v))
            move, m = share.get(v, (0.0, None))
            if m is not None and move >= least and move > keep and move >= again:
                moves.append(m)
            elif keep > 0.5 or (v in self.sim.saved_of and keep >= again):
                stored.add(v)
        return frozenset(stored), moves

    def _exchanges(self, mix: Candidate) -> list[Exchange]:
        """Single decisions that would save time, what promises most seconds a byte first."""
        graph, sim = self.graph, self.sim
        found: list[tuple[float, Exchange]] = []
        cheapest = sorted(
            (self.best_placement[v] for v in self.placements if v in mix.stored),
            key=lambda m: self._costs(m) / self._saves(m),
        )
        for v, m in mix.moves.items():
            rate = self._costs(m) / sim.value_bytes[v]
            found += [(rate, Exchange(stored=(v,), back=(v,))), (rate, Exchange(back=(v,)))]
        for index in mix.simulation.replayed:
            op = graph.operations[index]
            outputs = tuple(
                w
                for w in op.writes
                if sim.storable[w] and not (w in mix.stored or w in mix.moves or w in sim.evicted_by_scopes)
            )
            if not outputs:
                continue
            gain = op.seconds + graph.replay_overhead_seconds
            size = sum(sim.value_bytes[w] for w in outputs)
            rate = gain / max(1, size)
            found.append((rate, Exchange(outputs)))
            short, made = size, list[Move]()
            for m in cheapest:  # what moves instead frees bytes
                if short <= 0:
                    break
                if m.value not in outputs:
                    made.append(m)
                    short -= self._saves(m)
            going = [self.best_placement[w] for w in outputs if w in self.best_placement]
            if short <= 0 and gain > sum(map(self.relaxation.seconds_to_move, made)):
                found.append((rate, Exchange(outputs, moves=tuple(made))))
            if len(going) == len(outputs) and gain > sum(map(self.relaxation.seconds_to_move, going)):
                found.append((rate, Exchange(moves=tuple(going))))
        return [exchange for _, exchange in sorted(found, key=lambda row: -row[0])]

    def _polish(self, best: Candidate, budget: int) -> Candidate:
        """Exchange single decisions; the exact simulation decides each."""
        tries, improved = _TRIES, True
        while improved:
            improved = False
            for exchange in self._exchanges(best):
                if tries <= 0 or self.effort.over:
                    return best
                tries -= 1
                moves = [m for v, m in best.moves.items() if v not in exchange.back] + [*exchange.moves]
                other = self.candidate(best.stored.union(exchange.stored), moves, best.window)
                if self.fits(other, budget) and other.key < best.key:
                    best, improved = other, True
        return best


def host_bytes_of(m: Move) -> int:
    """What a move takes of main memory."""
    return -(-m.encoded_bytes // ALIGN) * ALIGN if m.tier == "host" else 0


def in_main_memory(taken: int, most: int) -> str:
    """What is told of a plan that moves values to main memory."""
    return f"values take {format_bytes(taken)} of main memory, and at most {format_bytes(most)} (host_budget)"


@dataclass(frozen=True, eq=False)
class Mixed:
    """What `mixed` returns: a policy.

    Args:
        ways, links, min_bytes, window_bytes, codecs, slab: as of `mixed`.
        seconds: about how long to search; ``None`` for as long as it takes.
        host_bytes: the most that moves to main memory; ``None`` for no limit.
        name: of its plans.
    """

    ways: tuple[Moving, ...]
    links: Links | None
    min_bytes: int
    window_bytes: int | None
    codecs: Sequence[Codec]
    slab: bool | None
    seconds: float | None = None
    host_bytes: int | None = None
    name: str = "mixed"

    def __call__(self, graph: StepGraph, budget: int | None = None) -> Plan:
        return obey_scopes(self._choose)(graph, budget)

    def with_links(self, device: str) -> Mixed:
        """The same, with the speeds of all that values may move to."""
        ways = self.ways or default_placements(device)
        return replace(self, ways=ways, links=missing_links(ways, self.links, self.codecs, device))

    def within_host(self, host_bytes: int) -> Mixed:
        """The same, which moves no more than so many bytes to main memory.

        Raises:
            PlanError: it moves nothing there.
        """
        tiers = [then.tier for way in self.ways if (then := form_and_tier(way)[1]) is not None]
        if self.ways and "host" not in tiers:
            raise PlanError(
                "host_budget= is for main memory, and this mixed policy moves nothing there: leave it out, "
                "or name 'host' among the policy's ways"
            )
        return replace(self, host_bytes=host_bytes)

    def smallest(self, graph: StepGraph) -> int:
        """The smallest peak of a step that is found."""
        search = search_of(graph)
        with search.lock:
            return self._searching(search).least(in_time=True).simulation.peak_bytes

    @property
    def searches(self) -> bool:
        """Whether nothing says for how long it searches (`lowtide.plan.policies.chosen.searches`)."""
        return self.seconds is None

    def hurried(self, seconds: float, device: str) -> Mixed:
        """The same, whose search takes about so many seconds, for values that leave that device."""
        return replace(self.with_links(device), seconds=seconds)

    def _searching(self, search: Search) -> MixedSearch:
        """The search for a mix, once all speeds are known."""
        speeds = self.links or {}
        placements = placements_of(search.sim, self.ways, speeds, self.min_bytes, self.codecs)
        return MixedSearch(search, placements, speeds, self.window_bytes, self.seconds, self.host_bytes)

    def _choose(self, graph: StepGraph, budget: int | None = None) -> Plan:
        known, search = self.with_links(graph.device), search_of(graph)
        speeds = known.links or {}
        with search.lock:
            mixed_search = known._searching(search)
            if budget is None and self.seconds is not None:
                best = mixed_search.least(in_time=True)
            else:
                best = mixed_search.solve(
                    mixed_search.least().simulation.peak_bytes if budget is None else budget
                )
            relaxation, limit = (
                mixed_search.relaxation,
                best.simulation.peak_bytes if budget is None else budget,
            )
            solved = limit in relaxation.floors  # the linear program, which takes as long as the search
            early = self.seconds is not None and not (solved and mixed_search.has_time)
            floor = relaxation.bound(limit) if solved else Bound(0.0, 0)
            notes = (ENDED_EARLY,) if early else ()
        if self.host_bytes is not None and any(m.tier == "host" for m in best.moves.values()):
            taken = sum(map(host_bytes_of, best.moves.values()))
            notes = (*notes, in_main_memory(taken, self.host_bytes))
        return make_plan(
            graph, stored=best.stored, policy=self.name, budget=budget, simulator=search.sim,
            moves={v: m.decision for v, m in best.moves.items()}, window_bytes=best.window,
            links=speeds, codecs=self.codecs, bound=floor, slab=self.slab, notes=notes,
        )  # fmt: skip


def mixed(
    *ways: str | Moving,
    links: Links | None = None,
    min_bytes: int = 1 << 16,
    window_bytes: int | None = None,
    codecs: Sequence[Codec] = (),
    slab: bool | None = None,
) -> Policy:
    """Keep, recompute, offload, compress or shard each value: the least extra time within the budget, with a
    bound for all schedules that move values in these ways. Without a budget: the smallest peak that is found.
    See `MixedSearch`.

    Args:
        ways: how values may move: ``"host"``, ``"disk"``, a codec's name, ``"auto"`` for lossless codecs, or
            decisions (`Offload` with a path, `Compress`, `Shard` for the inputs of blocks, `Chain`). By
            default the next tier down (the disk on a CPU, the host on a GPU) and ``"auto"``.
        links: speeds of tiers, codecs and groups by name. Missing speeds of tiers and codecs are measured. A
            group's speed is required (`lowtide.measure_links`).
        min_bytes: smaller values do not move.
        window_bytes: the most bytes in transfer at one time in each direction; chosen if it is not given.
        codecs: codecs of your own that ``ways`` name.
        slab: as in `offload`.

    Example:
        >>> from lowtide import policies
        >>> policy = policies.mixed("host", "disk", "auto")
    """
    chosen = tuple(decision_of(way) for way in ways)
    check_moves("mixed", min_bytes, window_bytes, links)
    listed = isinstance(codecs, Sequence) and all(hasattr(codec, "decode") for codec in codecs)
    listed = listed and not isinstance(codecs, bytes)
    expect(listed, "mixed(codecs=)", codecs, "a list of codecs of your own")
    return Mixed(chosen, links, min_bytes, window_bytes, tuple(codecs), slab)
