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

Where memory is tight, `lowtide.plan.bound.windows` adds a stage's backward, one backward node at a time:
there it also counts the replayed values that wait for later nodes. All other bytes that replays hold are left
out, so the bound is below the true optimum (FIELD, "Planning"; with integers it is Checkmate's program, arXiv
1910.02653, equations 1 and 7). `Relaxation.solve_whole` asks for whole s and r, which is sharper.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.plan.bound.columns import Decisions
from lowtide.plan.bound.program import Floats, Program
from lowtide.plan.bound.windows import Window
from lowtide.plan.simulate.simulator import Bytes, Simulator

_ROUNDS = 30
"""Times that rows are added and the program is solved; stopping early leaves a lower bound."""

_ROWS_PER_ROUND = 48
"""Moments above the budget whose rows are added at a time."""

_WINDOWS_PER_ROUND = 6
"""Stages whose backward is added at a time, the tightest first."""

_MOST_WINDOWS = 24
"""Stages whose backward is added at most: each takes several hundred columns."""

_WINDOW_COLUMNS = 60_000
"""Columns of all stages' backwards together; a stage that takes more than what is left is not added. Stacks
of layers take up to 18,000; a step through time, with thousands of operations a stage, would take millions.
"""

_NODES = 1
"""Branch-and-bound nodes: what whole numbers bring comes from the root."""


@dataclass(frozen=True)
class Bound:
    """Lower bounds on what any schedule needs.

    Attributes:
        extra_seconds: least extra time within the budget (infinite when no schedule fits).
        peak_bytes: least possible peak.
    """

    extra_seconds: float
    peak_bytes: int


class Relaxation(Decisions):
    """The linear program of one step graph; `solve` answers for a budget."""

    def whole_columns(self) -> Sequence[int]:
        """The columns that are decisions."""
        return range(len(self.values) + len(self.operations))

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

    def solve(self, budget: int, windows: bool = True) -> tuple[float, Floats]:
        """The least extra seconds of replays within ``budget`` (infinite when nothing fits), and the relaxed
        decisions.

        Memory rows are added as they are found violated, and ``windows`` where memory is tight. Stopping
        early leaves rows out, so the answer stays a lower bound.
        """
        count = len(self.values)
        self.point = np.zeros(count + len(self.operations))
        self.point[:count] = 1.0
        self.standing = self.fixed
        self.program = self.base_program()
        self.moments.clear()
        self.chosen: set[int] = set()
        self.windows: dict[int, Window] = {}
        return self._answer(budget, windows, changed=False)

    def solve_beside(self, budget: int, beside: Bytes) -> tuple[float, Floats]:
        """After `solve` for ``budget``, the same where ``beside`` stands at every event, too; that is no
        bound.
        """
        self.standing = self.fixed + beside
        for row, event in self.moments:
            self.program.right[row] = (budget - float(self.standing[event])) / max(1, budget)
        return self._answer(budget, True, changed=True)

    def _answer(self, budget: int, windows: bool, changed: bool) -> tuple[float, Floats]:
        """Rows are added and the program, which may have ``changed``, is solved until none are violated."""
        best = 0.0
        for _ in range(_ROUNDS):
            if not (self._tighten(self.point, budget, windows) or changed):
                break
            changed = False
            status, objective, answer = self.program.solve()
            if status == 2:
                return float("inf"), self.point
            if status != 0 or answer is None:
                break
            best = max(best, objective)
            self.point = answer
        return best, self.keep_answer(self.point)

    def keep_answer(self, point: Floats) -> Floats:
        """Of an answer, the decisions to store and to run again."""
        return point[: len(self.values) + len(self.operations)]

    def solve_whole(self, budget: int, gap: float) -> tuple[float, Floats | None]:
        """After `solve` for ``budget``: a sharper bound from decisions that are whole, within a relative
        ``gap`` of the best of them, and such decisions (they may exceed the budget a little).
        """
        _, bound, answer = self.program.solve(self.whole_columns(), _NODES, gap)
        return bound, None if answer is None else self.keep_answer(answer)

    def load_of(self, stored: Collection[int], replayed: Collection[int]) -> Floats:
        """The bytes that the program counts at every event for whole decisions."""
        again = set(replayed)
        point = [
            *(float(v in stored) for v in self.values),
            *(float(i in again) for i in self.operations),
            *(float(v in stored and not again.isdisjoint(readers)) for v, _, readers in self.extras),
        ]
        return self.fixed + self.occupancy(np.array(point))

    def _tighten(self, point: Floats, budget: int, windows: bool) -> bool:
        """Add the memory rows that ``point`` violates, or else ``windows`` where it is tight; whether there
        was anything to add.
        """
        scale = float(max(1, budget))
        load = (self.standing + self.occupancy(point)) / scale
        fresh = [e for e in self._violated(load) if e not in self.chosen]
        for event in fresh:
            self.chosen.add(event)
            entries = [(c, b / scale) for c, b in self.held_at(event)]
            self.add_moment(self.program, event, entries, budget, scale)
        return bool(fresh) or (windows and self._add_windows(self.program, self.windows, load, budget, scale))

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
        added = False
        for _, k in tight:
            window = Window(self, k)
            if window.columns + sum(other.columns for other in windows.values()) > _WINDOW_COLUMNS:
                continue
            window.add(program, budget, scale, windows.values())
            windows[k] = window
            added = True
        return added

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


def lower_bound(sim: Simulator, budget: int) -> Bound:
    """The least extra seconds that any schedule within ``budget`` bytes adds, and the least peak any schedule
    has.
    """
    relaxation = Relaxation(sim)
    peak = relaxation.least_peak()
    if budget >= sim.plain_peak:
        return Bound(0.0, peak)
    seconds, _ = relaxation.solve(budget)
    return Bound(seconds + sim.graph.overhead_seconds, peak)
