"""What every policy looks like."""

from __future__ import annotations

from typing import Protocol

from lowtide.graph import StepGraph
from lowtide.plan.data import Plan


class Policy(Protocol):
    """What every policy looks like."""

    def __call__(self, graph: StepGraph, budget: int | None = None) -> Plan:
        """The plan for ``graph``; a policy that cannot meet ``budget`` raises `BudgetError`."""
        ...
