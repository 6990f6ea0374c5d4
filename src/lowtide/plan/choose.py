"""Choose a plan by what a step under it really takes.

In: a step graph, a budget in bytes, and a price: a function from a plan to the bytes that a step under it
really takes. Out: a plan whose price is within the budget. What CUDA's caching allocator reserves follows
from the order of the blocks: there plan, price, ask again is one loop. A compiled step's plan asks for one
cut of each graph, and these are chosen together, so the compiled engine has a search of its own; of this file
it takes `Correction`, `NEAR` and `at_or_smallest`. Else an eager step takes what is simulated, and needs none
of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan import make
from lowtide.plan.data import Plan
from lowtide.plan.policies.build import Policy

Price = Callable[[Plan], int]

NEAR = 0.97
"""Share of a budget that binds, from which a plan uses it well."""

TRIES = 8
"""Plans that are tried for one budget."""


def predicted_bytes(plan: Plan) -> int:
    """The price of an eager step's plan: its steps take what was predicted."""
    return plan.predicted_peak_bytes


def choose(
    graph: StepGraph,
    budget: int,
    price: Price = predicted_bytes,
    *,
    policy: str | Policy = "optimal",
    target: int | None = None,
    first: Plan | None = None,
) -> Plan:
    """The plan with the least extra time that is found within the budget by its price.

    Args:
        graph: the step.
        budget: the most bytes that a step may really take.
        price: the bytes that a step under a plan really takes.
        policy: makes each plan, or its name.
        target: the bytes to plan for first; ``None`` for the budget.
        first: the plan for the target, where it is known.

    Raises:
        BudgetError: no plan that was tried fits; its ``smallest_bytes`` is the lowest price of any.

    Example:
        >>> import lowtide, torch
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())] * 3)
        >>> graph = lowtide.trace(lambda: model(torch.ones(64, 8)).sum())
        >>> plan = choose(graph, 20_000, lambda plan: plan.predicted_peak_bytes + 5_000)
        >>> plan.predicted_peak_bytes <= 15_000
        True
    """
    tried: list[tuple[int, Plan]] = []
    for plan, took in islice(attempts(graph, budget, price, policy, target, first), TRIES):
        tried.append((took, plan))
        lowered = any(other > budget for other, _ in tried)  # else it is the best for the budget
        if took <= budget and (not lowered or took >= NEAR * budget):
            break
    if fitting := [plan for took, plan in tried if took <= budget]:
        return min(fitting, key=lambda plan: plan.predicted_extra_seconds)
    least = min(took for took, _ in tried)
    raise BudgetError(None, least, budget_bytes=budget)


def attempts(
    graph: StepGraph,
    budget: int,
    price: Price,
    policy: str | Policy = "optimal",
    target: int | None = None,
    first: Plan | None = None,
) -> Iterator[tuple[Plan, int]]:
    """Plans and their prices: each is asked for as many bytes less or more as the one before was off, until
    nothing is left to ask for. The arguments are those of `choose`.

    Raises:
        BudgetError: no plan is found at all, or none whose simulated peak, which is the price, fits.
    """
    correction = Correction(budget)
    asked = budget if target is None else target
    while asked is not None:
        plan, first = first, None
        try:
            plan = plan or make(graph, max(1, asked), policy, progress=False)
        except BudgetError as error:
            least = error.smallest_bytes
            if least is None or (price is predicted_bytes and least > budget):
                raise
            plan = make(graph, least, policy, progress=False)
        took = price(plan)
        yield plan, took
        asked = correction.next_target(asked, plan.predicted_peak_bytes, took)


def at_or_smallest(graph: StepGraph, target: int, policy: str | Policy = "optimal") -> Plan:
    """The plan for ``target`` bytes, or the smallest one where that is larger.

    Raises:
        BudgetError: no plan is found at all.
    """
    plan, _ = next(attempts(graph, target, lambda _: 0, policy))
    return plan


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

    def next_target(self, target: int, predicted: int, took: int) -> int | None:
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
