"""How little extra time, and how small a peak, any schedule can have: lower bounds by a linear relaxation.

In: a `Simulator` and a budget. Out: a `Bound`. What the bound covers: every schedule that runs the step's operations in their recorded
order, in which each value either stays from forward until everything that rests on it is done (stored) or goes when the program lets go of
it, operations run again only in backward, as often as wanted, and every tensor that backward unpacks is there from its ``unpack`` to its
``done``. That includes every plan of docs/design.md. The costs are the traced ones.

The linear program has s_v in [0, 1] ("value v is stored") and r_i >= 0 ("how often operation i runs again"):

    minimise    sum of r_i * (seconds_i + dispatch overhead)
    s_v + r_prod(v)          >= 1      for every saved value v that backward unpacks
    s_u + r_prod(u) - r_i    >= 0      for every operation i and every value u that it reads
    natural(t) + sum of s_v * bytes_v + demanded(t) <= budget    at every moment t

At moment t, ``natural`` is what the program itself holds, the sum is over values that are dead by themselves at t and are surely still
held if they are stored, and ``demanded`` are the tensors that backward has unpacked and not yet dropped: they are there, stored or not.
A stored value is surely held until its own last unpack, or, when autograd does not save it, until the first moment at which anything that
is made from it is unpacked. Everything a replay holds beyond what is demanded at that moment is left out, so the bound is below the true
optimum (FIELD, "Planning"; the same program with integers and replay residency is Checkmate's, arXiv 1910.02653, equations 1 and 7).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from lowtide.plan.simulate import Simulator

_ROUNDS = 25
_ROWS_PER_ROUND = 48


@dataclass(frozen=True)
class Bound:
    """Lower bounds on what any schedule needs.

    Attributes:
        extra_seconds: least extra time within the budget (infinite when no schedule fits).
        peak_bytes: least possible peak.
    """

    extra_seconds: float
    peak_bytes: int


class Relaxation:
    """The linear program of one step graph; `solve` answers for a budget."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        graph = sim.graph
        self.feasible = self._feasible()
        self.demanded = [v for v in sim.droppable if sim.unpacked[v]]
        relevant: set[int] = set()
        stack = list(self.demanded)
        operations: set[int] = set()
        while stack:
            value = stack.pop()
            if value in relevant:
                continue
            relevant.add(value)
            index = sim.producer[value]
            if index in operations or not self.feasible[index]:
                continue
            operations.add(index)
            stack.extend(u for u in graph.operations[index].reads if not sim.base_flags[u])
        self.values = sorted(relevant)
        self.operations = sorted(operations)
        self.column = {v: k for k, v in enumerate(self.values)}
        self.op_column = {i: len(self.values) + k for k, i in enumerate(self.operations)}
        self._moments()
        self._constraints()

    def _feasible(self) -> list[bool]:
        from lowtide.plan.build import feasible_replays

        return feasible_replays(self.sim)

    def _moments(self) -> None:
        """Per value, the events between which a stored copy is surely extra; per event, what is there in any case."""
        sim = self.sim
        end = sim.end
        first_need = self._first_needs()
        self.span: dict[int, tuple[int, int]] = {}
        fixed = np.zeros(end + 1, dtype=np.int64)
        self.handed: dict[int, list[tuple[int, int]]] = {}
        for value in self.values:
            dead = sim.natural_end[sim.storage_of[value]]
            last = -1
            handed: list[tuple[int, int]] = []
            for tensor in sim.saved_of.get(value, ()):
                for start, until in sim.unpacks[tensor]:
                    last = max(last, start)
                    handed.append((max(start, dead), until))
            until = last if last >= 0 else first_need.get(value, -1)
            if sim.graph.values[value].storable and dead < until:
                self.span[value] = (dead, until)
            merged: list[tuple[int, int]] = []
            for start, stop in sorted(h for h in handed if h[0] < h[1]):
                if merged and start <= merged[-1][1]:
                    merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
                else:
                    merged.append((start, stop))
            self.handed[value] = merged
        by_storage: dict[int, list[tuple[int, int]]] = {}
        for value, spans in self.handed.items():
            by_storage.setdefault(sim.storage_of[value], []).extend(spans)
        for value in self.values:
            for start, stop in self.handed[value]:
                fixed[start] += sim.value_bytes[value]
                fixed[stop] -= sim.value_bytes[value]
        self.fixed = sim.natural_live + np.cumsum(fixed[:end]) + sim.scratch

    def _first_needs(self) -> dict[int, int]:
        """Value -> the first unpack of anything that is made from it."""
        sim = self.sim
        need: dict[int, int] = {}
        for value in self.demanded:
            need[value] = min(start for t in sim.saved_of[value] for start, _ in sim.unpacks[t])
        for index in reversed(self.operations):
            op = sim.graph.operations[index]
            here = min((need[w] for w in op.writes if w in need), default=None)
            if here is not None:
                for u in op.reads:
                    need[u] = min(need.get(u, here), here)
        return need

    def _constraints(self) -> None:
        sim = self.sim
        graph = sim.graph
        columns = len(self.values) + len(self.operations)
        rows: list[int] = []
        cols: list[int] = []
        data: list[float] = []
        right: list[float] = []

        def entry(row: int, column: int, value: float) -> None:
            rows.append(row)
            cols.append(column)
            data.append(value)

        for v in self.demanded:
            row = len(right)
            entry(row, self.column[v], -1)
            if sim.producer[v] in self.op_column and not graph.values[v].must_store:
                entry(row, self.op_column[sim.producer[v]], -1)
            right.append(-1)
        for i in self.operations:
            for u in graph.operations[i].reads:
                if sim.base_flags[u]:
                    continue
                row = len(right)
                entry(row, self.op_column[i], 1)
                if graph.values[u].storable:
                    entry(row, self.column[u], -1)
                if sim.producer[u] in self.op_column and not graph.values[u].must_store:
                    entry(row, self.op_column[sim.producer[u]], -1)
                right.append(0)
        self.logic = csr_array((data, (rows, cols)), shape=(len(right), columns))
        self.logic_right = np.array(right, dtype=float)
        self.cost = np.zeros(columns)
        for i, column in self.op_column.items():
            self.cost[column] = graph.operations[i].seconds + graph.replay_overhead_seconds
        self.upper = np.ones(columns)

    def _occupancy(self, stored: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes of stored values at every event, those handed out left aside (they are in ``fixed``)."""
        change = np.zeros(self.sim.end + 1)
        for value, (start, until) in self.span.items():
            amount = stored[self.column[value]]
            if amount > 1e-9:
                size = self.sim.value_bytes[value] * amount
                for a, b in self._pieces(value, start, until):
                    change[a] += size
                    change[b] -= size
        return np.cumsum(change[:-1])

    def _pieces(self, value: int, start: int, until: int) -> list[tuple[int, int]]:
        pieces: list[tuple[int, int]] = []
        for a, b in self.handed[value]:
            if a > start:
                pieces.append((start, min(a, until)))
            start = max(start, b)
        if start < until:
            pieces.append((start, until))
        return [(a, b) for a, b in pieces if a < b]

    def _row(self, event: int) -> dict[int, float]:
        row: dict[int, float] = {}
        for value, (start, until) in self.span.items():
            if start <= event < until and any(a <= event < b for a, b in self._pieces(value, start, until)):
                row[self.column[value]] = float(self.sim.value_bytes[value])
        return row

    def forced(self) -> NDArray[np.float64]:
        """1 for every value that each schedule stores: demanded, and not to be brought back."""
        stored = np.zeros(len(self.values))
        for v in self.demanded:
            if self.sim.producer[v] not in self.op_column or self.sim.graph.values[v].must_store:
                stored[self.column[v]] = 1
        return stored

    def least_peak(self) -> int:
        """No schedule has a smaller peak."""
        if not self.sim.end:
            return self.sim.graph.resident_bytes
        return int(np.ceil((self.fixed + self._occupancy(self.forced())).max() - 0.5))

    def solve(self, budget: int) -> tuple[float, NDArray[np.float64] | None]:
        """The least extra seconds of replays within ``budget``, and the relaxed decisions.

        Memory rows are added as they are found violated. Stopping early leaves rows out, so the answer stays a lower bound.
        """
        if not self.values:
            return 0.0, np.zeros(0)
        scale = float(max(1, budget))
        chosen: dict[int, None] = {}
        total = len(self.values) + len(self.operations)
        rows: list[int] = []
        cols: list[int] = []
        data: list[float] = []
        right: list[float] = []
        best = 0.0
        point: NDArray[np.float64] | None = None
        candidate = np.zeros(total)
        candidate[: len(self.values)] = 1.0
        for _ in range(_ROUNDS):
            load = (self.fixed + self._occupancy(candidate[: len(self.values)])) / scale
            fresh = [e for e in self._violated(load) if e not in chosen]
            if not fresh:
                break
            for event in fresh:
                chosen[event] = None
                for column, value in self._row(event).items():
                    rows.append(len(right))
                    cols.append(column)
                    data.append(value / scale)
                right.append((budget - float(self.fixed[event])) / scale)
            memory = csr_array((data, (rows, cols)), shape=(len(right), total))
            matrix = _stack(self.logic, memory)
            answer = linprog(
                self.cost,
                A_ub=matrix,
                b_ub=np.concatenate([self.logic_right, right]),
                bounds=np.stack([np.zeros(total), self.upper], axis=1),
                method="highs",
            )
            if answer.status == 2:
                return float("inf"), None
            if answer.status != 0 or answer.x is None:
                break
            best = max(best, float(answer.fun))
            candidate = np.asarray(answer.x)
            point = candidate
        if point is None:
            point = candidate
        return best, point

    def _violated(self, load: NDArray[np.float64]) -> list[int]:
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


def _stack(a: csr_array, b: csr_array) -> csr_array:
    return csr_array(
        (
            np.concatenate([a.data, b.data]),
            np.concatenate([a.indices, b.indices]),
            np.concatenate([a.indptr, a.indptr[-1] + b.indptr[1:]]),
        ),
        shape=(a.shape[0] + b.shape[0], a.shape[1]),
    )


def lower_bound(sim: Simulator, budget: int) -> Bound:
    """The least extra seconds that any schedule within ``budget`` bytes adds, and the least peak any schedule has."""
    relaxation = Relaxation(sim)
    peak = relaxation.least_peak()
    if budget >= sim.plain_peak:
        return Bound(0.0, peak)
    seconds, _ = relaxation.solve(budget)
    return Bound(seconds + sim.graph.overhead_seconds, peak)
