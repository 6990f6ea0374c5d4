"""How little extra time, and how small a peak, any schedule can have: lower bounds by a linear relaxation.

In: a `Simulator` and a budget. Out: a `Bound`. What the bound covers: every schedule that runs the step's
operations in their recorded order, in which each value either stays from forward until everything that
depends on it is done (stored) or is freed with user code's last reference, operations run again only in
backward, each at most once, and every tensor that backward unpacks is there from its ``unpack`` to its
``done``. That includes every plan of docs/design.md. The costs are the traced ones.
What checkpointing scopes evict is not stored.

The linear program has s_v in [0, 1] ("value v is stored") and r_i in [0, 1] ("operation i runs again"):

    minimise    sum of r_i * (seconds_i + dispatch overhead)
    s_v + r_prod(v)          >= 1      for every saved value v that backward unpacks
    s_u + r_prod(u) - r_i    >= 0      for every operation i and every value u that it reads
    natural(t) + sum of s_v * bytes_v + demanded(t) <= budget    at every moment t

At moment t, ``natural`` is what user code itself holds, the sum is over values that are dead by themselves
at t and are surely still held if they are stored, and ``demanded`` are the tensors that backward has unpacked
and not yet dropped: they are there, stored or not. A stored value is surely held until its own last unpack,
or, when autograd does not save it, until the last unpack of the first of the saved values that replays can
make from it. All other bytes that replays hold are left out, so the bound is below the true optimum (with
whole numbers it is Checkmate's program, arXiv 1910.02653, equations 1 and 7).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from lowtide.plan.simulate.index import Bytes, bytes_over_time, replay_set
from lowtide.plan.simulate.simulator import Simulator

_ROUNDS = 30
"""How often rows are added and the linear program is solved; stopping early leaves a lower bound."""

_ROWS_PER_ROUND = 48
"""For how many moments above the budget rows are added at a time."""

_NODES = 1
"""Branch-and-bound nodes of a program in whole numbers: the gain over the relaxed one comes at the root."""

Floats = NDArray[np.float64]

A_SECOND = 750_000
"""How many operations are simulated in about a second: the unit of a search's work."""

A_COLUMN = 30
"""Work of solving a linear program, in simulated operations for each of its columns."""

_WHOLE = 3
"""How many times as much work a program in whole numbers is."""

Spans = list[tuple[int, int]]
"""Half-open stretches of time, in events."""


class Effort:
    """The work that one search has done, and the limit at which it ends: counted, not timed, so that the same
    graph gets the same plan.

    Args:
        limit: operations to simulate, or as much of other work.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.spent = limit, 0.0

    @property
    def over(self) -> bool:
        """Whether the search ends with what it has found."""
        return self.spent >= self.limit

    def renew(self, limit: float) -> None:
        """Begin another search."""
        self.limit, self.spent = limit, 0.0

    def extend(self, share: float) -> None:
        """Leave at least a share of the limit for what follows."""
        self.limit = max(self.limit, self.spent + share * self.limit)

    def note(self, operations: float) -> None:
        """Count operations that were simulated, or as much of other work."""
        self.spent += operations


class LinearProgram:
    """A linear program that grows, solved by HiGHS: minimise ``cost``, every row at most its right side,
    every column between 0 and its upper bound.
    """

    def __init__(self) -> None:
        self.cost, self.upper, self.right = list[float](), list[float](), list[float]()
        self.rows, self.columns, self.data = list[int](), list[int](), list[float]()

    def column(self, cost: float = 0.0, upper: float = 1.0) -> int:
        """A new column."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def row(self, entries: list[tuple[int, float]], right: float) -> int:
        """A new row: the sum of the entries is at most ``right``."""
        for column, value in entries:
            self.rows.append(len(self.right))
            self.columns.append(column)
            self.data.append(value)
        self.right.append(right)
        return len(self.right) - 1

    def solve(
        self, whole: Sequence[int] = (), nodes: int | None = None, gap: float = 0.0
    ) -> tuple[int, float, Floats | None]:
        """HiGHS's status (0 solved, 2 infeasible), a lower bound on the objective, and the best point found.

        Args:
            whole: columns that are to be whole numbers.
            nodes, gap: of branch and bound, how many nodes at most and the relative distance that will do.
        """
        count = len(self.cost)
        if not count:  # HiGHS takes no program without columns
            infeasible = any(right < 0 for right in self.right)
            return (2, float("inf"), None) if infeasible else (0, 0.0, np.zeros(0))
        scale = max(max(self.cost), 1e-12)
        matrix = csr_array((self.data, (self.rows, self.columns)), shape=(len(self.right), count))
        integrality = np.zeros(count)
        integrality[list(whole)] = 1
        # scipy's stubs know single numbers only
        right, lower, upper = map(cast(Any, np.array), (self.right, [0.0] * count, self.upper))
        answer = milp(
            np.array(self.cost) / scale,
            constraints=LinearConstraint(matrix, ub=right) if self.right else (),
            bounds=Bounds(lower, upper),
            integrality=integrality,
            options={} if nodes is None else {"node_limit": nodes, "mip_rel_gap": gap},
        )
        if answer.status == 2:
            return 2, float("inf"), None
        bound = answer.mip_dual_bound if len(whole) else answer.fun
        least = float(bound) * scale if bound is not None and np.isfinite(bound) else 0.0
        return int(answer.status), least, None if answer.x is None else np.asarray(answer.x)


@dataclass(frozen=True)
class Bound:
    """The least ``extra_seconds`` of any schedule within a budget, infinite where none fits, and the least
    possible ``peak_bytes``.
    """

    extra_seconds: float
    peak_bytes: int


class Relaxation:
    """The linear program of one step graph; `solve` answers for a budget. Its columns are the decisions,
    relaxed to shares between 0 and 1: values, then operations.

    Args:
        sim: the step.
        effort: counts what is solved, and says when to stop.

    Attributes:
        floors: budget -> seconds that no schedule undercuts, the most that is known by now.
    """

    def __init__(self, sim: Simulator, effort: Effort | None = None) -> None:
        self.sim, self.effort = sim, effort or Effort(float("inf"))
        self.floors: dict[int, float] = {}
        self._answers: dict[int, tuple[float, Floats]] = {}
        self.demanded = [v for v in sim.droppable if v in sim.last_unpack]
        evictable = [v for v in self.demanded if not sim.must[v]]
        operations = replay_set(evictable, sim.producer, sim.reads, sim.must)
        self.values = sorted({*self.demanded, *(u for index in operations for u in sim.reads[index])})
        self.operations = sorted(operations)
        self.column = {v: k for k, v in enumerate(self.values)}
        self.op_column = {i: len(self.values) + k for k, i in enumerate(self.operations)}
        self._rows = np.array(self._tabulate(self._hand_out(), self._surely_held()), dtype=np.int64)
        self._rows = self._rows.reshape(-1, 4)
        self._begin(0)

    @property
    def count(self) -> int:
        """How many columns decide."""
        return len(self.values) + len(self.operations)

    # ---- what a decision costs and allows --------------------------------------------------------

    def _available(self, value: int) -> list[tuple[int, float]]:
        """The columns, each with -1, by which an operation can read ``value``: stored or replayed."""
        entries = [(self.column[value], -1.0)] if self.sim.graph.values[value].storable else []
        return [*entries, *self.replays_of(value)]

    def _demandable(self, value: int) -> list[tuple[int, float]]:
        """The columns, each with -1, by which backward can unpack ``value``: stored or replayed."""
        return [(self.column[value], -1.0), *self.replays_of(value)]

    def replays_of(self, value: int) -> list[tuple[int, float]]:
        """The column of ``value``'s replay, with -1; nothing where it may not be replayed."""
        column = self.op_column.get(self.sim.producer[value])
        return [] if column is None else [(column, -1.0)]

    def _begin(self, budget: int) -> None:
        """Begin with a program without memory rows, and all values stored."""
        self._budget, graph = budget, self.sim.graph
        self._moments: dict[int, int] = {}
        """event -> the linear program's row of its memory"""
        self._point = np.zeros(self.count)
        self._point[: len(self.values)] = 1.0
        self.linear_program = program = LinearProgram()
        for v in self.values:
            program.column(upper=0.0 if v in self.sim.evicted_by_scopes else 1.0)
        for i in self.operations:
            program.column(graph.operations[i].seconds + graph.replay_overhead_seconds)
        for v in self.demanded:
            program.row(self._demandable(v), -1.0)
        for i in self.operations:
            for u in self.sim.reads[i]:
                program.row([(self.op_column[i], 1.0), *self._available(u)], 0.0)

    def point_of(self, stored: Collection[int], replayed: Collection[int]) -> Floats:
        """Whole decisions as a point of the linear program."""
        again, point = set(replayed), np.zeros(self.count)
        whole = [*(v in stored for v in self.values), *(i in again for i in self.operations)]
        point[: len(whole)] = whole
        return point

    def _forced_shares(self) -> Floats:
        """As a point, the least share of every value's bytes that each schedule holds: all of what is
        demanded and may not be replayed.
        """
        least = np.zeros(self.count)
        least[[self.column[v] for v in self.demanded if not self.replays_of(v)]] = 1.0
        return least

    # ---- memory ----------------------------------------------------------------------------------

    def _surely_held(self) -> dict[int, int]:
        """Operation -> the event until which what it reads is held at least, if it runs again.

        An operation runs again because one of its outputs is not stored: a saved one, which then depends on
        what the operation reads until its own last unpack, or one that another replay reads.
        """
        sim = self.sim
        by_reader: dict[int, int] = {}
        until: dict[int, int] = {}
        for index in reversed(self.operations):
            op = sim.graph.operations[index]
            here = min(
                (sim.last_unpack.get(w, by_reader.get(w, sim.end)) for w in op.writes if w in self.column),
                default=sim.end,
            )
            until[index] = here
            for u in op.reads:
                by_reader[u] = min(by_reader.get(u, here), here)
        return until

    def _hand_out(self) -> dict[int, Spans]:
        """Storage -> when backward has unpacked a tensor in it; with what user code itself holds, that makes
        what every schedule holds at each event. Several versions of one storage may be handed out at
        once, and all of them be one block: it counts once.
        """
        sim = self.sim
        handed: dict[int, Spans] = {}
        for value in self.demanded:
            sid = sim.storage_of[value]
            for tensor in sim.saved_of[value]:
                spans = [(max(start, sim.natural_end[sid]), until) for start, until in sim.unpacks[tensor]]
                handed.setdefault(sid, []).extend(s for s in spans if s[0] < s[1])
        changes: list[tuple[int, int]] = []
        for sid in handed:
            handed[sid], size = _merge(handed[sid]), sim.graph.storages[sid].bytes
            for start, stop in handed[sid]:
                changes += ((start, size), (stop, -size))
        self.fixed: Bytes = sim.natural_live + bytes_over_time(changes, sim.end) + sim.scratch
        """bytes that every schedule holds at each event"""
        return handed

    def _tabulate(
        self, handed: dict[int, Spans], held_until: dict[int, int]
    ) -> list[tuple[int, int, int, int]]:
        """One row for each stretch of time in which a column takes memory beyond what is `fixed`: column,
        begin, end and bytes. A stored value does when it is dead by itself and surely held.
        """
        sim, rows = self.sim, list[tuple[int, int, int, int]]()
        for value in self.values:
            sid, holds = sim.storage_of[value], [held_until[i] for i in sim.readers[value] if i in held_until]
            until = sim.last_unpack[value] if value in sim.last_unpack else min(holds, default=-1)
            if sim.storable[value]:
                spans = _outside(handed.get(sid, []), sim.natural_end[sid], until)
                rows += [(self.column[value], a, b, sim.value_bytes[value]) for a, b in spans]
        return rows

    def occupancy(self, point: Floats) -> Floats:
        """Bytes of what a point stores at every event, but what is handed out (that is in ``fixed``)."""
        column, start, stop, size = self._rows.T
        amount, change = size * point[column], np.zeros(self.sim.end + 1)
        np.add.at(change, start, amount)
        np.subtract.at(change, stop, amount)
        return np.cumsum(change[:-1])

    # ---- answers ---------------------------------------------------------------------------------

    @cached_property
    def least_peak(self) -> int:
        """No schedule has a smaller peak."""
        if not self.sim.end:
            return self.sim.graph.resident_bytes
        return int(np.ceil((self.fixed + self.occupancy(self._forced_shares())).max() - 0.5))

    def bound(self, budget: int) -> Bound:
        """The bound for ``budget`` bytes: the sharpest that was found so far, by `solve` where none was."""
        if budget >= self.sim.plain_peak and not self.sim.evicted_by_scopes:
            return Bound(0.0, self.least_peak)
        if budget not in self.floors:
            self.solve(budget)
        return Bound(self.floors[budget] + self.sim.graph.overhead_seconds, self.least_peak)

    def solve(self, budget: int, margins: Bytes | None = None) -> tuple[float, Floats]:
        """The least extra seconds within ``budget`` (infinite when nothing fits), and the relaxed decisions.
        Memory rows are added as they are found violated; stopping early leaves rows out, so the answer stays
        a lower bound. With ``margins``, bytes that are taken at each event as well, the answer is no bound.
        """
        if margins is None and budget in self._answers:
            return self._answers[budget]
        if budget != self._budget:
            self._begin(budget)
        held = self.fixed if margins is None else self.fixed + margins
        for event, row in self._moments.items():
            self.linear_program.right[row] = (budget - float(held[event])) / max(1, budget)
        seconds = self._add_rows_and_solve(budget, held)
        if margins is None:
            self.floors[budget] = max(seconds, self.floors.get(budget, 0.0))
            if not self.effort.over:  # else it may have ended early
                self._answers[budget] = seconds, self._point
        return seconds, self._point

    def _add_rows_and_solve(self, budget: int, held: Bytes) -> float:
        """Add the memory rows of moments at which the relaxed decisions and the bytes ``held`` exceed
        ``budget``, and solve, until no moment does."""
        best = 0.0
        for number in range(_ROUNDS):
            load = (held + self.occupancy(self._point)) / max(1, budget)
            fresh = [event for event in self._worst_events(load) if event not in self._moments]
            for event in fresh:
                self._add_moment(event, budget, float(held[event]))
            if number and not fresh:
                break
            status, objective, answer = self.linear_program.solve()
            self.effort.note(A_COLUMN * len(self.linear_program.cost))
            if status == 2:
                return float("inf")
            if status != 0 or answer is None:
                break
            best, self._point = max(best, objective), answer
            if self.effort.over:
                break
        return best

    def solve_whole(self, budget: int, gap: float) -> tuple[float, Floats | None]:
        """After `solve` for ``budget``: a sharper bound from decisions that are whole, within a relative
        ``gap`` of the best of them, and such decisions (they may exceed the budget a little).
        """
        if budget != self._budget:  # its answer was known, and the linear program is another one by now
            self._answers.pop(budget, None)
            self.solve(budget)
        _, bound, answer = self.linear_program.solve(range(self.count), _NODES, gap)
        self.effort.note(_WHOLE * A_COLUMN * len(self.linear_program.cost))
        if bound < float("inf"):
            self.floors[budget] = max(bound, self.floors[budget])
        return bound, answer

    def _add_moment(self, event: int, budget: int, held: float) -> None:
        """The row of what takes memory at an event, in shares of the budget."""
        column, start, stop, size = self._rows.T
        there, scale = (start <= event) & (event < stop), max(1, budget)
        entries = list(zip(column[there].tolist(), (size[there] / scale).tolist(), strict=True))
        self._moments[event] = self.linear_program.row(entries, (budget - held) / scale)

    def _worst_events(self, load: Floats) -> list[int]:
        """The worst events above the budget, at most one in each stretch of the step."""
        over = np.flatnonzero(load > 1 + 1e-7)
        worst = over[np.argsort(-load[over], kind="stable")]
        stretch = max(1, self.sim.end // (2 * _ROWS_PER_ROUND))
        _, first = np.unique(worst // stretch, return_index=True)
        return worst[np.sort(first)][:_ROWS_PER_ROUND].tolist()


def _merge(spans: Spans) -> Spans:
    """The union of spans."""
    merged: Spans = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _outside(handed: Spans, start: int, until: int) -> Spans:
    """The parts of ``start`` to ``until`` that lie outside ``handed``."""
    pieces: Spans = []
    for a, b in handed:
        if a > start:
            pieces.append((start, min(a, until)))
        start = max(start, b)
    if start < until:
        pieces.append((start, until))
    return [(a, b) for a, b in pieces if a < b]
