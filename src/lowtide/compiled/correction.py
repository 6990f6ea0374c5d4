"""Ask the planner again, for fewer bytes or more, by what its last plan would really take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan import make
from lowtide.plan.data import Plan
from lowtide.plan.policies.build import Policy

T = TypeVar("T")

ROUNDS = 6
"""Plans for one budget, each corrected by what the one before would really take."""

NEAR = 0.97
"""Share of a binding budget from which a plan uses it well."""


@dataclass
class Correction:
    """Finds what to ask for, so that what a plan really takes comes close to ``room`` and not above.

    What is off grows with what runs again, in steps: so a target that fits and one that does not are kept,
    and what follows lies between them; before one fits, each step down is twice the last, at least.

    Args:
        room: bytes that a plan may really take.

    Attributes:
        fits: the highest target so far whose plan fits.
        exceeds: the lowest whose plan does not.
    """

    room: int
    fits: int | None = None
    exceeds: int | None = None
    _step: int = 0

    def following(self, target: int, predicted: int, took: int) -> int | None:
        """What to ask for next; ``None`` when nothing is left to try.

        Args:
            target: what was asked for, in bytes.
            predicted: what the planner says of its plan.
            took: what the plan really takes.
        """
        found = self.room - (took - predicted)
        if took <= self.room:
            self.fits = max(target, self.fits or 0)
        else:
            self.exceeds = min(target, self.exceeds or target)
            if self._step:
                found = min(found, target - 2 * self._step)
            self._step = max(0, target - found)
        if self.fits is not None and self.exceeds is not None and not self.fits < found < self.exceeds:
            found = (self.fits + self.exceeds) // 2
        return None if found < 0 or found in (target, self.fits) else found


def share_of_largest(plan: Callable[[str | int], T], budget: str | int, before: Iterable[Plan]) -> T:
    """What ``plan`` makes of a budget. Where that is a share and too small for this step, its bytes are those
    of the largest step so far: a last, small batch has room for what larger ones may take.

    Args:
        plan: plans within a budget.
        budget: as of `lowtide.limit_memory`.
        before: plans for other steps within the same budget.

    Raises:
        BudgetError: no plan is found that fits.
    """
    try:
        return plan(budget)
    except BudgetError as error:
        largest = max((one.budget_bytes or 0 for one in before), default=0)
        share = isinstance(budget, str) and budget.strip().endswith("%")
        if not share or error.smallest_bytes is None or error.smallest_bytes > largest:
            raise
    return plan(largest)


def at_or_smallest(graph: StepGraph, target: int | None, policy: str | Policy = "optimal") -> Plan:
    """The plan for ``target`` bytes, or the smallest one where that is larger.

    Raises:
        BudgetError: no plan is found at all.
    """
    try:
        return make(graph, None if target is None else max(1, target), policy, progress=False)
    except BudgetError as error:
        if error.smallest_bytes is None:
            raise
        return make(graph, error.smallest_bytes, policy, progress=False)
