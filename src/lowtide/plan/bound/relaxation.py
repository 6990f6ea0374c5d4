"""How little extra time, and how small a peak, any schedule can have: lower bounds by a linear relaxation.

In: a `Simulator` and a budget. Out: a `Bound`. What the bound covers: every schedule that runs the step's
operations in their recorded order, in which each value either stays from forward until everything that
depends on it is done (stored) or is freed with the program's last reference, operations run again only in
backward, each at most once, and every tensor that backward unpacks is there from its ``unpack`` to its
``done``. That includes every plan of docs/design.md. The costs are the traced ones.
What checkpointing scopes evict is not stored.

The linear program has s_v in [0, 1] ("value v is stored") and r_i in [0, 1] ("operation i runs again"):

    minimise    sum of r_i * (seconds_i + dispatch overhead)
    s_v + r_prod(v)          >= 1      for every saved value v that backward unpacks
    s_u + r_prod(u) - r_i    >= 0      for every operation i and every value u that it reads
    natural(t) + sum of s_v * bytes_v + demanded(t) <= budget    at every moment t

At moment t, ``natural`` is what the program itself holds, the sum is over values that are dead by themselves
at t and are surely still held if they are stored, and ``demanded`` are the tensors that backward has unpacked
and not yet dropped: they are there, stored or not. A stored value is surely held until its own last unpack,
or, when autograd does not save it, until the last unpack of the first of the saved values that replays can
make from it.

Where values may also move (`lowtide.plan.moves.placements`), every value v and way k has m_vk in [0, 1]. A
value that moves may be unpacked and, where its codec allows, replayed from, so the sum of m_vk over k joins
s_v in the first two rows. Moving costs encoding, decoding, the executor's own time, and what a transfer takes
from the operations beside it; waiting has rows of its own (`lowtide.plan.bound.waiting`). What waits encoded
or cut on the device takes its bytes from the operation that made it to its last unpack; copies under way are
left out.

Where memory is tight, `lowtide.plan.bound.windows` adds a stage's backward, one backward node at a time:
there it also counts the replayed values that wait for later nodes. All other bytes that replays hold are left
out, so the bound is below the true optimum (FIELD, "Planning"; with integers it is Checkmate's program, arXiv
1910.02653, equations 1 and 7). `Relaxation.solve_whole` wants whole s and r, which is sharper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.plan.bound.columns import Columns
from lowtide.plan.bound.effort import Effort
from lowtide.plan.bound.program import Floats
from lowtide.plan.bound.waiting import add_waiting
from lowtide.plan.bound.windows import Window
from lowtide.plan.data import Links, Move
from lowtide.plan.simulate.simulator import Bytes, Simulator
from lowtide.plan.split.stages import Stages, find_stages

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


class Relaxation(Columns):
    """The linear program of one step graph; `solve` answers for a budget.

    Args:
        sim, stages, placements, links: as of `Columns`.
        effort: counts what is solved, and says when to stop.

    Attributes:
        floors: budget -> seconds that no schedule undercuts, the most that is known by now.
    """

    def __init__(
        self,
        sim: Simulator,
        stages: Stages | None = None,
        placements: Mapping[int, Sequence[Move]] | None = None,
        links: Links | None = None,
        effort: Effort | None = None,
    ) -> None:
        super().__init__(sim, stages or find_stages(sim), placements or {}, links or {})
        self.floors: dict[int, float] = {}
        self.effort = effort or Effort(float("inf"))
        self._budget: int | None = None  # what the program is for, where nothing was put beside it
        self._answers: dict[bool, tuple[float, Floats]] = {}  # of this program, by whether with windows

    @cached_property
    def least_peak(self) -> int:
        """No schedule has a smaller peak."""
        if not self.sim.end:
            return self.sim.graph.resident_bytes
        return int(np.ceil((self.fixed + self.occupancy(self.forced())).max() - 0.5))

    def bound(self, budget: int, windows: bool = True) -> Bound:
        """No schedule within ``budget`` bytes adds less; the sharpest that is known, else by `solve`."""
        if budget >= self.sim.plain_peak and not self.sim.forced:
            return Bound(0.0, self.least_peak)
        if budget not in self.floors:
            self.solve(budget, windows)
        return Bound(self.floors[budget] + self.sim.graph.overhead_seconds, self.least_peak)

    def solve(self, budget: int, windows: bool = True) -> tuple[float, Floats]:
        """The least extra seconds within ``budget`` (infinite when nothing fits), and the relaxed decisions.

        Memory rows are added as they are found violated, and ``windows`` where memory is tight. Stopping
        early leaves rows out, so the answer stays a lower bound. What was solved for this budget before is
        gone on with.
        """
        if self._budget != budget or (self.windows and not windows):
            self._begin(budget)
        if windows not in self._answers:
            changed = bool(self.sim.forced) and not self._answers
            found = self._seconds, self.point = self._answer(budget, windows, self._seconds, changed)
            if self.effort.over:
                self._budget = None  # it may have ended early
            self._answers[windows] = found
        seconds, point = self._answers[windows]
        self.floors[budget] = max(seconds, self.floors.get(budget, 0.0))
        return seconds, point

    def _begin(self, budget: int) -> None:
        """Begin with a program without memory rows."""
        self.point = np.zeros(self.count)
        self.point[: len(self.values)] = 1.0
        self.held = self.fixed
        """bytes held at each event by every schedule, and those that `solve_beside` adds"""
        self.program = self.base_program()
        add_waiting(self.program, self)
        self.moments: list[tuple[int, int]] = []
        """(row, event) of the program's rows of memory"""
        self.chosen: set[int] = set()
        self.windows: dict[int, Window] = {}
        self._budget, self._seconds = budget, 0.0
        self._answers.clear()

    def solve_beside(self, budget: int, beside: Bytes) -> tuple[float, Floats]:
        """After `solve` for ``budget``, the same with ``beside`` bytes more at each event: no bound."""
        self._budget = None
        self.held = self.fixed + beside
        for row, event in self.moments:
            self.program.right[row] = (budget - float(self.held[event])) / max(1, budget)
        return self._answer(budget, True, changed=True)

    def _answer(
        self, budget: int, windows: bool, best: float = 0.0, changed: bool = False
    ) -> tuple[float, Floats]:
        """Rows are added and the program, which may have ``changed``, is solved until none are violated.
        ``best`` seconds are known to be undercut by no schedule.
        """
        for _ in range(_ROUNDS):
            if not (self._tighten(self.point, budget, windows) or changed):
                break
            changed = False
            status, objective, answer = self.program.solve()
            self.effort.solved(len(self.program.cost))
            if status == 2:
                return float("inf"), self.point
            if status != 0 or answer is None:
                break
            best = max(best, objective)
            self.point = answer
            if self.effort.over:
                break
        return best, self.point

    def solve_whole(self, budget: int, gap: float) -> tuple[float, Floats | None]:
        """After `solve` for ``budget``: a sharper bound from decisions that are whole, within a relative
        ``gap`` of the best of them, and such decisions (they may exceed the budget a little).
        """
        _, bound, answer = self.program.solve(range(self.count), _NODES, gap)
        self.effort.solved(len(self.program.cost), whole=True)
        if bound < float("inf"):
            self.floors[budget] = max(bound, self.floors[budget])
        return bound, answer

    def _add_moment(self, event: int, entries: list[tuple[int, float]], budget: int) -> None:
        """The row of what takes memory at an event, in shares of the budget."""
        scale = max(1, budget)
        right = (budget - float(self.held[event])) / scale
        row = self.program.row([(column, size / scale) for column, size in entries], right)
        self.moments.append((row, event))

    def _tighten(self, point: Floats, budget: int, windows: bool) -> bool:
        """Add the memory rows that ``point`` violates, or else ``windows`` where it is tight; whether any was
        added.
        """
        load = (self.held + self.occupancy(point)) / max(1, budget)
        fresh = [e for e in self._violated(load) if e not in self.chosen]
        for event in fresh:
            self.chosen.add(event)
            self._add_moment(event, self.held_at(event), budget)
        return bool(fresh) or (windows and self._add_windows(load, budget))

    def _add_windows(self, load: Floats, budget: int) -> bool:
        """Add the stages whose backward is tightest; whether any was added."""
        windows = self.windows
        spans = [(k, a, b) for k, (a, b) in enumerate(self.stages.window_events) if a < b]
        tight = sorted((-float(load[a:b].max()), k) for k, a, b in spans if k not in windows)
        most = min(_WINDOWS_PER_ROUND, _MOST_WINDOWS - len(windows))
        added = False
        for _, k in [(level, k) for level, k in tight if level < -0.9][:most]:
            window = Window(self, self.held, k)
            if window.columns + sum(other.columns for other in windows.values()) > _WINDOW_COLUMNS:
                continue
            for event, entries in window.add(self.program, windows.values()):
                self._add_moment(event, entries, budget)
            windows[k] = window
            added = True
        return added

    def _violated(self, load: Floats) -> list[int]:
        """The worst events above the budget, at most one in each stretch of the step."""
        over = np.flatnonzero(load > 1 + 1e-7)
        worst = over[np.argsort(-load[over], kind="stable")]
        stretch = max(1, self.sim.end // (2 * _ROWS_PER_ROUND))
        _, first = np.unique(worst // stretch, return_index=True)
        return worst[np.sort(first)][:_ROWS_PER_ROUND].tolist()
