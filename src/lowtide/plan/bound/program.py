"""A linear program that grows, solved by HiGHS; and what a search may take: counted, not timed, so that the
same graph gets the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Floats = NDArray[np.float64]

A_SECOND = 750_000
"""Operations that are simulated in about a second."""

_A_COLUMN = 30
"""Operations that could be simulated while a linear program is solved, for each of its columns."""

_WHOLE = 3
"""How much longer one takes where the columns are to be whole numbers."""


class Effort:
    """The work that one search has done, and the limit at which it ends.

    Args:
        limit: operations to simulate, or as much of other work.

    Example:
        >>> effort = Effort(limit=100)
        >>> effort.note_simulation(60), effort.over, effort.note_simulation(60), effort.over
        (None, False, None, True)
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.spent = limit, 0.0

    @property
    def over(self) -> bool:
        """Whether what is found has to do."""
        return self.spent >= self.limit

    def renew(self, limit: float) -> None:
        """Begin another search."""
        self.limit, self.spent = limit, 0.0

    def extend(self, share: float) -> None:
        """Leave at least a share of the limit for what follows."""
        self.limit = max(self.limit, self.spent + share * self.limit)

    def note_simulation(self, operations: float) -> None:
        """Count operations that were simulated."""
        self.spent += operations

    def note_solution(self, columns: int, whole: bool = False) -> None:
        """Count a linear program that was solved."""
        self.spent += columns * _A_COLUMN * (_WHOLE if whole else 1)


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
        right: Any = np.array(self.right)  # scipy's stubs know single numbers only
        lower: Any = np.zeros(count)
        upper: Any = np.array(self.upper)
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
