"""What a plan may use of a budget, and what is said where none fits."""

from __future__ import annotations

from lowtide.budget import SLACK_BYTES, SLACK_SHARE, STANDING, STATE, too_small, with_slack
from lowtide.errors import BudgetError


def within(limit: int) -> int:
    """What a plan may use of a budget of `limit` bytes."""
    return int(limit - min(limit * SLACK_SHARE, SLACK_BYTES))


def beyond(
    error: BudgetError, limit: int, margin_bytes: int, enough: int, whole: int | None, state_bytes: int = 0
) -> BudgetError:
    """The refusal of a budget of `limit` bytes, with a smallest budget that will be accepted.

    Args:
        error: what the planner said.
        limit: the budget.
        margin_bytes: what steps were seen to take beside their prediction.
        enough: nothing has to be evicted in so many bytes.
        whole: what percentages are of, where one was given.
        state_bytes: of what stands, how much is the optimizer's state.
    """
    assert error.smallest_bytes is not None
    smallest = min(enough, with_slack(error.smallest_bytes + margin_bytes) + 1)
    parts = dict(error.parts)
    standing = parts.pop(STANDING, 0)
    rest = {STATE: min(state_bytes, standing), STANDING: max(0, standing - state_bytes)}
    parts = {**{name: count for name, count in rest.items() if count}, **parts}
    return too_small(limit, smallest, parts, policy=error.policy, plain_peak_bytes=whole, detail=error.detail)
