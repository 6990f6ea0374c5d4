"""What is compiled and planned for one kind of step: with no gradients when it begins, or with some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lowtide.compiled.partitioner import Report
from lowtide.compiled.whole import WholeStep
from lowtide.plan.data import Plan


@dataclass(eq=False)
class Kind:
    """The code and the plans of one kind of step.

    Attributes:
        whole: decides about steps of several graphs.
        report: the plans of graphs that are a whole step.
        run: the model's forward, compiled.
        calls: of blocks that are compiled one by one, what calls each.
    """

    whole: WholeStep
    report: Report = field(default_factory=Report)
    run: Callable[..., Any] = field(init=False)
    calls: list[Any] = field(init=False)

    @property
    def gradients_bytes(self) -> int:
        """The gradients that may stand when such a step begins."""
        return self.whole.gradients_bytes

    @property
    def plans(self) -> list[Plan]:
        """The plans that were made for it."""
        return self.report.planned + [step.plan for step in self.whole.plans.values()]

    def takes(self, gradients_bytes: int) -> bool:
        """Whether it holds its budget where so many bytes of gradients stand when a step begins. If so its
        plans are for that from now on: those of whole graphs where there is room; steps of several graphs
        are planned for again, since that compiles only what is cut in another way.

        Raises:
            BudgetError: no plan of a step of several graphs fits.
        """
        more = gradients_bytes - self.gradients_bytes
        if more <= 0:
            return True
        open_sizes = any(self.report.held.values())  # which grow until there is no room left
        above = any(one.predicted_peak_bytes + more > (one.budget_bytes or 0) for one in self.report.planned)
        if not self.plans or open_sizes or above:
            return False
        self.whole.plan_for(gradients_bytes)
        self.report.planned[:] = [
            replace(
                plan,
                predicted_peak_bytes=plan.predicted_peak_bytes + more,
                plain_peak_bytes=plan.plain_peak_bytes + more,
                bound_peak_bytes=plan.bound_peak_bytes + more,
            )
            for plan in self.report.planned
        ]
        return True
