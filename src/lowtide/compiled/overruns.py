"""The warnings of compiled steps that took more than their budget."""

from __future__ import annotations

from collections import Counter

from lowtide import budget as budgets

AT_LENGTH = 3
"""How many warnings of steps above their budget say at length why; later ones are short."""


class Overruns:
    """The warnings of steps that took more than their budget: long ones at first, short ones later.

    Attributes:
        steps: how many took more, by why.
    """

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()

    def text(
        self, took: int, limit: int, predicted: int, why: str, new: bool = True, same: bool = False
    ) -> str:
        """The warning.

        Args:
            took, limit, predicted: bytes.
            why: the step took more, or what follows.
            new: the step was not told of yet.
            same: it was, for the same reason, and has taken more since.
        """
        self.steps[why] += new
        size = budgets.format_bytes(took)
        above = f"{took - limit:,} bytes above the budget of {budgets.format_bytes(limit)}"
        if same:
            return f"after another backward the same step took {size}, {above}"
        if self.steps[why] > AT_LENGTH:
            total = self.steps.total()
            return f"a planned step took {size}, {above} ({total} of this limit's steps took more so far)"
        forecast = budgets.format_bytes(predicted)
        return f"a planned step took {size} where {forecast} was predicted, {above}: {why}"
