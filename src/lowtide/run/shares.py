"""What a plan may use of a budget, and what is said where none fits."""

from __future__ import annotations

import math

from lowtide.errors import BudgetError

REAL_SHARES = 0.9, 0.94  # of the budget, for plans from a trace of real tensors; the second where no plan fits in the first, for two
# such traces see scratch that differs by a little
ANSWERED_SHARES = 0.95, 0.95  # and from one of a step that goes by what is in its tensors, which will be something else another time
_SLACK_SHARE = 1e-3  # of the budget, at most `_SLACK_BYTES`, for the few bytes of scalars that a trace does not show
_SLACK_BYTES = 1 << 16


def slack_bytes(limit: int | None) -> int:
    """What a plan leaves of a budget of `limit` bytes for what no trace shows."""
    return 0 if limit is None else math.ceil(min(limit * _SLACK_SHARE, _SLACK_BYTES))


def within(limit: int, share: float) -> int:
    """What a plan may use of a budget of `limit` bytes."""
    return int((limit - min(limit * _SLACK_SHARE, _SLACK_BYTES)) * share)


def beyond(error: BudgetError, limit: int, share: float, enough: int, whole: int | None) -> BudgetError:
    """The refusal of a budget of `limit` bytes, with a smallest budget that will be accepted, of which a plan may use a share; nothing has to be
    given up in `enough` bytes. Also as a share of `whole` bytes, where one was given."""
    assert error.smallest_bytes is not None
    wanted = error.smallest_bytes / share
    smallest = min(enough, math.ceil(min(wanted / (1 - _SLACK_SHARE), wanted + _SLACK_BYTES)) + 1)
    detail = error.detail
    if share < 1 and smallest < enough:
        detail += f" {100 * (1 - share):.0f}% of it is for what the trace does not show: other steps of this model may need other amounts."
    said = f", {math.ceil(1000 * smallest / whole) / 10:g}% of the plain step's peak" if whole else ""
    return BudgetError(f"no plan fits in {limit:,} bytes: the smallest that can be met is {smallest:,} bytes{said}.", smallest, detail)
