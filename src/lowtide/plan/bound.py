"""How little extra time, and how small a peak, any schedule can have: lower bounds by a linear relaxation.

In: a `Simulator` and a budget. Out: a `Bound`. What the bound covers: every schedule that runs the step's
operations in their recorded order, in which each value either stays from forward until everything that rests
on it is done (stored) or goes when the program lets go of it, operations run again only in backward, each at
most once, and every tensor that backward unpacks is there from its ``unpack`` to its ``done``. That includes
every plan of docs/design.md. The costs are the traced ones.

The linear program has s_v in [0, 1] ("value v is stored") and r_i in [0, 1] ("operation i runs again"):

    minimise    sum of r_i * (seconds_i + dispatch overhead)
    s_v + r_prod(v)          >= 1      for every saved value v that backward unpacks
    s_u + r_prod(u) - r_i    >= 0      for every operation i and every value u that it reads
    natural(t) + sum of s_v * bytes_v + demanded(t) <= budget    at every moment t

At moment t, ``natural`` is what the program itself holds, the sum is over values that are dead by themselves
at t and are surely still held if they are stored, and ``demanded`` are the tensors that backward has unpacked
and not yet dropped: they are there, stored or not. A stored value is surely held until its own last unpack,
or, when autograd does not save it, until the last unpack of the first of the saved values that replays can
make from it; for each operation i that reads it and rests on it longer, s_v + r_i - 1 of it is there longer.

Where memory is tight, `lowtide.plan.windows` adds a stage's backward, one backward node at a time: there it
also counts the replayed values that wait for later nodes. All other bytes that replays hold are left out, so
the bound is below the true optimum (FIELD, "Planning"; with integers it is Checkmate's program, arXiv
1910.02653, equations 1 and 7). `Relaxation.solve_whole` asks for whole s and r, which is sharper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from lowtide.plan.closure import replay_set
from lowtide.plan.feasible import feasible_replays
from lowtide.plan.simulate import Simulator
from lowtide.plan.stages import Stages, find_stages
from lowtide.plan.windows import Window

Floats = NDArray[np.float64]

_ROUNDS = 30
_ROWS_PER_ROUND = 48
_WINDOWS_PER_ROUND = 6
_MOST_WINDOWS = 24
_DEPTH = 1


@dataclass(frozen=True)
class Bound:
    """Lower bounds on what any schedule needs.

    Attributes:
        extra_seconds: least extra time within the budget (infinite when no schedule fits).
        peak_bytes: least possible peak.
    """

    extra_seconds: float
    peak_bytes: int


class Program:
    """A linear program that grows: minimise ``cost``, every row at most its right side, every column between
    0 and its upper bound.
    """

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.data: list[float] = []
        self.right: list[float] = []

    def column(self, cost: float = 0.0, upper: float = 1.0) -> int:
        """A new column."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def row(self, entries: list[tuple[int, float]], right: float) -> None:
        """A new row: the sum of the entries is at most ``right``."""
        for column, value in entries:
            self.rows.append(len(self.right))
            self.columns.append(column)
            self.data.append(value)
        self.right.append(right)

    def solve(self) -> tuple[int, float, Floats]:
        """HiGHS's status (0 solved, 2 infeasible), the objective, and the columns."""
        if not self.cost:  # HiGHS takes no program without columns
            return self._without_columns(), 0.0, np.zeros(0)
        shape = (len(self.right), len(self.cost))
        matrix = csr_array((self.data, (self.rows, self.columns)), shape=shape)
        scale = max(max(self.cost, default=0.0), 1e-12)
        answer = linprog(
            np.array(self.cost) / scale,
            A_ub=matrix,
            b_ub=np.array(self.right),
            bounds=np.stack([np.zeros(shape[1]), np.array(self.upper)], axis=1),
            method="highs",
        )
        if answer.status != 0 or answer.x is None:
            return int(answer.status), 0.0, np.zeros(shape[1])
        return 0, float(answer.fun) * scale, np.asarray(answer.x)

    def _without_columns(self) -> int:
        """The status of a program in which nothing is to be decided."""
        return 2 if any(right < 0 for right in self.right) else 0

    def solve_integral(
        self, integral: Sequence[int], nodes: int, gap: float
    ) -> tuple[int, float, Floats | None]:
        """As `solve` with the columns ``integral`` whole numbers: status, lower bound on the objective, and
        the best point found.
        """
        if not self.cost:
            status = self._without_columns()
            return (status, float("inf"), None) if status else (0, 0.0, np.zeros(0))
        count = len(self.cost)
        scale = max(max(self.cost, default=0.0), 1e-12)
        whole = np.zeros(count)
        whole[list(integral)] = 1
        limits: Any = np.array(self.right)
        upper: Any = np.array(self.upper)
        lower: Any = np.zeros(count)
        none: Any = -np.inf
        answer = milp(
            np.array(self.cost) / scale,
            constraints=LinearConstraint(
                csr_array((self.data, (self.rows, self.columns)), shape=(len(self.right), count)),
                none,
                limits,
            ),
            bounds=Bounds(lower, upper),
            integrality=whole,
            options={"node_limit": nodes, "mip_rel_gap": gap},
        )
        if answer.status == 2:
            return 2, float("inf"), None
        bound = answer.mip_dual_bound
        least = float(bound) * scale if bound is not None and np.isfinite(bound) else 0.0
        return int(answer.status), least, None if answer.x is None else np.asarray(answer.x)


class Relaxation:
    """The linear program of one step graph; `solve` answers for a budget."""

    def __init__(self, sim: Simulator, stages: Stages | None = None) -> None:
        self.sim = sim
        graph = sim.graph
        self.stages = stages or find_stages(sim)
        self.feasible = feasible_replays(sim)
        self.demanded = [v for v in sim.droppable if sim.unpacked[v]]
        reads = [[u for u in op.reads if not sim.base_flags[u]] for op in graph.operations]

        def final(value: int) -> bool:
            """Whether nothing brings it back."""
            return sim.producer[value] < 0 or not self.feasible[sim.producer[value]]

        operations = replay_set([v for v in self.demanded if not final(v)], sim.producer, reads, final)
        self.values = sorted({*self.demanded, *(u for index in operations for u in reads[index])})
        self.operations = sorted(operations)
        self.column = {v: k for k, v in enumerate(self.values)}
        self.op_column = {i: len(self.values) + k for k, i in enumerate(self.operations)}
        self._moments()
        self._rests()

    def seconds_of(self, index: int) -> float:
        """What one more run of an operation costs."""
        return self.sim.graph.operations[index].seconds + self.sim.graph.replay_overhead_seconds

    def replay_column(self, value: int) -> int | None:
        """The column of the operation that brings ``value`` back, if any may."""
        if self.sim.graph.values[value].must_store:
            return None
        return self.op_column.get(self.sim.producer[value])

    def available(self, value: int) -> list[tuple[int, float]]:
        """Entries that are -1 when an operation can read ``value``: it is stored, replayed, or waits
        elsewhere.
        """
        entries = [(self.column[value], -1.0)] if self.sim.graph.values[value].storable else []
        replay = self.replay_column(value)
        return [
            *entries,
            *([] if replay is None else [(replay, -1.0)]),
            *self.moves_of(value, replayed_from=True),
        ]

    def moves_of(self, value: int, replayed_from: bool = False) -> list[tuple[int, float]]:
        """Entries that are -1 when ``value`` waits elsewhere (so that a replay may read it): none, nothing
        moves here.
        """
        return []

    def whole_columns(self) -> Sequence[int]:
        """The columns that are decisions."""
        return range(len(self.values) + len(self.operations))

    def _moments(self) -> None:
        """Per value, the events between which a stored copy is surely extra; per event, what is there in any
        case.
        """
        sim = self.sim
        end = sim.end
        self.rests_until = self._surely_held()
        self.span: dict[int, tuple[int, int]] = {}
        fixed = np.zeros(end + 1, dtype=np.int64)
        self.handed: dict[int, list[tuple[int, int]]] = {}
        self.pieces: dict[int, list[tuple[int, int]]] = {}
        by_storage: dict[int, list[tuple[int, int]]] = {}
        for value in self.demanded:
            sid = sim.storage_of[value]
            for tensor in sim.saved_of[value]:
                spans = [(max(start, sim.natural_end[sid]), until) for start, until in sim.unpacks[tensor]]
                by_storage.setdefault(sid, []).extend(s for s in spans if s[0] < s[1])
        for sid, spans in by_storage.items():
            # Several versions of one storage may be handed out at once, and all of them be one block: it
            # counts once.
            by_storage[sid] = _merged(spans)
            for start, stop in by_storage[sid]:
                fixed[start] += sim.graph.storages[sid].bytes
                fixed[stop] -= sim.graph.storages[sid].bytes
        for value in self.values:
            sid = sim.storage_of[value]
            dead = sim.natural_end[sid]
            last = max(
                (start for t in sim.saved_of.get(value, ()) for start, _ in sim.unpacks[t]), default=-1
            )
            until = (
                last if last >= 0 else min((self.rests_until[i] for i in self._readers(value)), default=-1)
            )
            self.handed[value] = by_storage.get(sid, [])
            if sim.graph.values[value].storable and dead < until:
                self.span[value] = (dead, until)
                self.pieces[value] = _outside(self.handed[value], dead, until)
        self.fixed = sim.natural_live + np.cumsum(fixed[:end]) + sim.scratch

    def _readers(self, value: int) -> list[int]:
        return [i for i in self.sim.readers[value] if i in self.op_column]

    def _rests(self) -> None:
        """Where a stored value is held longer when a certain operation is to run again: (value, pieces, such
        operations), a column each.
        """
        self.extras: list[tuple[int, list[tuple[int, int]], list[int]]] = []
        least = (self.sim.plain_peak - self.sim.graph.resident_bytes) / 4000
        for value, (dead, until) in self.span.items():
            if self.sim.value_bytes[value] < least:
                continue
            readers = self._readers(value)
            start = until
            for level in sorted({self.rests_until[i] for i in readers if self.rests_until[i] > until}):
                pieces = _outside(self.handed[value], max(dead, start), level)
                if pieces:
                    self.extras.append((value, pieces, [i for i in readers if self.rests_until[i] >= level]))
                start = level

    def _surely_held(self) -> dict[int, int]:
        """Operation -> the event until which what it reads is held at least, if it runs again.

        An operation runs again because one of its outputs is not stored: a saved one, which then rests on
        what the operation reads until its own last unpack, or one that another replay reads.
        """
        sim = self.sim
        last = {v: max(start for t in sim.saved_of[v] for start, _ in sim.unpacks[t]) for v in self.demanded}
        by_reader: dict[int, int] = {}
        until: dict[int, int] = {}
        for index in reversed(self.operations):
            op = sim.graph.operations[index]
            here = min(
                (last.get(w, by_reader.get(w, sim.end)) for w in op.writes if w in self.column),
                default=sim.end,
            )
            until[index] = here
            for u in op.reads:
                by_reader[u] = min(by_reader.get(u, here), here)
        return until

    def base_program(self) -> Program:
        """Columns and rows without memory."""
        graph = self.sim.graph
        program = Program()
        for _ in self.values:
            program.column()
        for i in self.operations:
            program.column(self.seconds_of(i))
        for v in self.demanded:
            replay = self.replay_column(v)
            program.row(
                [(self.column[v], -1.0), *([] if replay is None else [(replay, -1.0)]), *self.moves_of(v)],
                -1.0,
            )
        for i in self.operations:
            for u in graph.operations[i].reads:
                if not self.sim.base_flags[u]:
                    program.row([(self.op_column[i], 1.0), *self.available(u)], 0.0)
        for value, _, readers in self.extras:
            held = program.column()
            for i in readers:
                program.row([(self.column[value], 1.0), (self.op_column[i], 1.0), (held, -1.0)], 1.0)
        return program

    def occupancy(self, point: Floats) -> Floats:
        """Bytes of stored values at every event, those handed out left aside (they are in ``fixed``)."""
        change = np.zeros(self.sim.end + 1)
        first = len(self.values) + len(self.operations)
        held = [(value, pieces, point[self.column[value]]) for value, pieces in self.pieces.items()]
        held += [
            (value, pieces, point[first + k])
            for k, (value, pieces, _) in enumerate(self.extras)
            if first + k < len(point)
        ]
        for value, pieces, amount in held:
            if amount > 1e-9:
                size = self.sim.value_bytes[value] * amount
                for a, b in pieces:
                    change[a] += size
                    change[b] -= size
        return np.cumsum(change[:-1])

    @cached_property
    def _spread(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """All pieces: whose they are, and the events between which they last."""
        table = np.array(
            [(value, a, b) for value, pieces in self.pieces.items() for a, b in pieces], dtype=np.int64
        ).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    def held_at(self, event: int, without: set[int] | None = None) -> list[tuple[int, float]]:
        """Entries of the stored values that take memory at ``event``."""
        whose, start, stop = self._spread
        there = dict.fromkeys(whose[(start <= event) & (event < stop)].tolist())
        entries = [
            (self.column[v], float(self.sim.value_bytes[v]))
            for v in there
            if without is None or v not in without
        ]
        first = len(self.values) + len(self.operations)
        for k, (value, pieces, _) in enumerate(self.extras):
            own = without is not None and value in without and value not in self.sim.saved_of
            if not own and any(a <= event < b for a, b in pieces):
                entries.append((first + k, float(self.sim.value_bytes[value])))
        return entries

    def forced(self) -> Floats:
        """1 for every value that each schedule stores: demanded, and not to be brought back."""
        stored = np.zeros(len(self.values))
        for v in self.demanded:
            if self.replay_column(v) is None:
                stored[self.column[v]] = 1
        return stored

    def least_peak(self) -> int:
        """No schedule has a smaller peak."""
        if not self.sim.end:
            return self.sim.graph.resident_bytes
        return int(np.ceil((self.fixed + self.occupancy(self.forced())).max() - 0.5))

    def solve(self, budget: int) -> tuple[float, Floats]:
        """The least extra seconds of replays within ``budget`` (infinite when nothing fits), and the relaxed
        decisions.

        Memory rows are added as they are found violated, and windows where memory is tight. Stopping early
        leaves rows out, so the answer stays a lower bound.
        """
        count = len(self.values)
        point = np.zeros(count + len(self.operations))
        point[:count] = 1.0
        self.program = self.base_program()
        self.chosen: set[int] = set()
        self.windows: dict[int, Window] = {}
        best = 0.0
        for _ in range(_ROUNDS):
            if not self._tighten(point, budget):
                break
            status, objective, answer = self.program.solve()
            if status == 2:
                return float("inf"), point
            if status != 0:
                break
            best = max(best, objective)
            point = answer
        return best, self.keep_answer(point)

    def keep_answer(self, point: Floats) -> Floats:
        """Of an answer, the decisions to store and to run again."""
        return point[: len(self.values) + len(self.operations)]

    def solve_whole(self, budget: int, nodes: int, gap: float) -> tuple[float, Floats | None]:
        """After `solve`: a sharper bound from decisions that are whole, and such decisions (they may exceed
        the budget a little).
        """
        best, point = 0.0, None
        for _ in range(3):
            status, bound, answer = self.program.solve_integral(self.whole_columns(), nodes, gap)
            best = max(best, bound)
            if status == 2 or answer is None:
                break
            point = self.keep_answer(answer)
            if not self._tighten(answer, budget):
                break
        return best, point

    def _tighten(self, point: Floats, budget: int) -> bool:
        """Add the memory rows that ``point`` violates, or else the windows where it is tight; whether there
        was anything to add.
        """
        scale = float(max(1, budget))
        load = (self.fixed + self.occupancy(point)) / scale
        fresh = [e for e in self._violated(load) if e not in self.chosen]
        for event in fresh:
            self.chosen.add(event)
            self.program.row(
                [(c, b / scale) for c, b in self.held_at(event)], (budget - float(self.fixed[event])) / scale
            )
        return bool(fresh) or self._add_windows(self.program, self.windows, load, budget, scale)

    def _add_windows(
        self, program: Program, windows: dict[int, Window], load: Floats, budget: int, scale: float
    ) -> bool:
        """Add the stages whose backward is tightest; whether there was one."""
        tight: list[tuple[float, int]] = []
        for k, (a, b) in enumerate(self.stages.window_events):
            if a < b and k not in windows:
                tight.append((-float(load[a:b].max()), k))
        tight = [(x, k) for x, k in sorted(tight) if -x > 0.9][
            : min(_WINDOWS_PER_ROUND, _MOST_WINDOWS - len(windows))
        ]
        for _, k in tight:
            window = Window(self, k, _DEPTH)
            window.add(program, budget, scale, windows.values())
            windows[k] = window
        return bool(tight)

    def _violated(self, load: Floats) -> list[int]:
        """The worst events above the budget, at most one in each stretch of the step."""
        over = np.flatnonzero(load > 1 + 1e-7)
        if not len(over):
            return []
        stretch = max(1, self.sim.end // (2 * _ROWS_PER_ROUND))
        worst: dict[int, int] = {}
        for event in over.tolist():
            key = event // stretch
            if key not in worst or load[event] > load[worst[key]]:
                worst[key] = event
        ordered = sorted(worst.values(), key=lambda e: (-load[e], e))
        return ordered[:_ROWS_PER_ROUND]


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of spans."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _outside(handed: list[tuple[int, int]], start: int, until: int) -> list[tuple[int, int]]:
    """The parts of ``start`` to ``until`` that lie outside ``handed``."""
    pieces: list[tuple[int, int]] = []
    for a, b in handed:
        if a > start:
            pieces.append((start, min(a, until)))
        start = max(start, b)
    if start < until:
        pieces.append((start, until))
    return [(a, b) for a, b in pieces if a < b]


def lower_bound(sim: Simulator, budget: int, stages: Stages | None = None) -> Bound:
    """The least extra seconds that any schedule within ``budget`` bytes adds, and the least peak any schedule
    has.
    """
    relaxation = Relaxation(sim, stages)
    peak = relaxation.least_peak()
    if budget >= sim.plain_peak:
        return Bound(0.0, peak)
    seconds, _ = relaxation.solve(budget)
    return Bound(seconds + sim.graph.overhead_seconds, peak)
