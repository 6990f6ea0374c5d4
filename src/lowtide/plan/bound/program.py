"""A linear program that grows, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

Floats = NDArray[np.float64]


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
