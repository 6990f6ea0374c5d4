"""What commands ask for where a flag is left out."""

from __future__ import annotations

import pytest

from lowtide.flags import budget_asked


@pytest.mark.parametrize(
    ("budget", "policy", "asked"),
    [
        (None, None, "60%"), (None, "optimal", "60%"), (None, "mixed", "60%"),
        (None, "auto", "60%"),
        (None, "full", None), ("min", None, "min"), ("1GiB", "full", "1GiB"),
    ],
)  # fmt: skip
def test_a_budget_is_assumed_only_where_nothing_says_what_is_wanted(
    budget: str | None, policy: str | None, asked: str | None
) -> None:
    assert budget_asked(budget, policy) == asked
