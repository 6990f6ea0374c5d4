"""A budget that is a share of a small step goes by the largest step so far."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from lowtide.compiled.choose_cuts import at_once, fallback_bytes, search_within
from lowtide.errors import BudgetError
from lowtide.plan import Plan

LARGE = Plan("g", "optimal", 1000, {}, frozenset(), (), 2000, 900, 1.0, 0.1)


def searched(smallest: int | None, asked: list[str | int], budget: str | int) -> Generator[None, None, Any]:
    """Refuses shares, and bytes below the smallest budget."""
    asked.append(budget)
    if isinstance(budget, str) or smallest is None or budget < smallest:
        raise BudgetError("too small", smallest)
    yield
    return budget


def found(budget: str | int, smallest: int | None, before: list[Plan]) -> tuple[Any, list[str | int]]:
    asked: list[str | int] = []
    largest = fallback_bytes(budget, before)
    return at_once(search_within(lambda given: searched(smallest, asked, given), budget, largest)), asked


def test_a_share_that_is_too_small_becomes_the_bytes_of_the_largest_step() -> None:
    before = [replace(LARGE, budget_bytes=400), LARGE]
    assert found("60%", 800, before) == (1000, ["60%", 1000])


@pytest.mark.parametrize(
    ("budget", "smallest", "before"),
    [
        ("60%", 800, []),  # no larger step has been
        ("60%", 1001, [LARGE]),  # nor had that room for this one
        ("60%", None, [LARGE]),  # nothing says what would do
        ("min", 800, [LARGE]),
        (700, 800, [LARGE]),
    ],
)
def test_other_budgets_are_refused_as_they_were(
    budget: str | int, smallest: int | None, before: list[Plan]
) -> None:
    with pytest.raises(BudgetError, match="too small"):
        found(budget, smallest, before)
