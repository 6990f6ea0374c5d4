"""The text of a `lowtide.BudgetError`, of its facts: see `lowtide.errors.Words`."""

from __future__ import annotations

from lowtide.errors import BudgetError
from lowtide.plan.simulate.holders import holders_at_peak, parts_of, place_of_peak
from lowtide.plan.simulate.simulator import Simulation, Simulator
from lowtide.remedies import ACTIVATIONS, Holder, in_lines, in_short, largest, what_to_do


def short(error: BudgetError) -> str:
    """What the step takes that is above its budget, in a line."""
    budget, smallest = error.budget_bytes or 0, error.smallest_bytes or 0
    return in_short(budget, smallest, error.parts, error.subject, error.policy)


def remedies(error: BudgetError) -> list[str]:
    """What to do, any one of these."""
    budget, smallest, plain = error.budget_bytes or 0, error.smallest_bytes or 0, error.plain_peak_bytes
    return what_to_do(budget, smallest, error.parts, error.policy, plain, holders=_largest(error))


def holders(error: BudgetError) -> tuple[str, ...]:
    """A line for each of those that hold most at the peak."""
    return tuple(in_lines(_largest(error)))


def at_peak(sim: Simulator, least: Simulation) -> tuple[dict[str, int], tuple[Holder, ...], str]:
    """What is live at a peak, in bytes by name; who holds what the step made; and where the peak is."""
    return parts_of(sim, least), tuple(holders_at_peak(sim, least)), f"Its peak is at {place_of_peak(least)}."


def _largest(error: BudgetError) -> tuple[Holder, ...]:
    known = error.made or ACTIVATIONS not in error.parts  # else who holds these is not known
    return largest(error.made, error.parts) if known else ()
