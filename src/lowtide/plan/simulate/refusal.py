"""A refusal in words: what a budget that no plan meets is told."""

from __future__ import annotations

from lowtide.budget import too_small
from lowtide.errors import BudgetError
from lowtide.plan.data import module_in_words
from lowtide.plan.simulate.holders import holders_at_peak, parts_of
from lowtide.plan.simulate.simulator import Simulation, Simulator


def refusal(sim: Simulator, least: Simulation, budget_bytes: int, policy: str = "") -> BudgetError:
    """The refusal of a budget by the plan that takes least.

    Args:
        sim: of the step.
        least: what the step takes under that plan.
        budget_bytes: what was asked for.
        policy: the policy that makes the plan, where another may need less.
    """
    detail = f"At its peak stands {at_peak(least)}."
    made = holders_at_peak(sim, least)
    parts = parts_of(sim, least)
    return too_small(budget_bytes, least.peak_bytes, parts, policy=policy, detail=detail, made=made)


def at_peak(simulation: Simulation) -> str:
    """What runs at the peak, in words."""
    op = simulation.peak_operation
    if op is None:
        return "what stood before the step"
    how = "replayed " if simulation.peak_in_replay else ""
    return f"{how}operation {op.name} (number {op.index}, {op.phase}) in {module_in_words(op.module)}"
