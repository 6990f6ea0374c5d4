"""The search of cuts: what is compiled while it goes on, and a share that is too small for a small step."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.compiled.choose_cuts import (
    Chosen,
    Rejected,
    at_once,
    fallback_bytes,
    search_within,
    try_cuts,
)
from lowtide.compiled.lower import Generated
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


class _Code(Generated):
    """Is priced while it is compiled, as Inductor's text is."""

    def __init__(self) -> None:
        self._texts = {}

    def compile(self, half: Any, inputs: Any, then: Any, **_: Any) -> None:
        self._texts = {False: half, True: half}
        then()


class _Graph:
    """Notes which of its cuts were compiled to the end."""

    joint, has_readable_text = SimpleNamespace(calls=()), True

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.compiled: list[str] = []

    def run_as(self, way: str, inner: Any) -> None:
        self.begun.append(way)
        inner(None, ())
        self.compiled.append(way)


def test_a_cut_that_the_search_rejects_is_not_compiled_to_the_end() -> None:
    graph, (first, second) = _Graph(), _cuts("first", "second")

    def search() -> Generator[Any, None, Chosen]:
        yield (first,)
        assert first.code.priced
        yield Rejected()
        yield (second,)
        return Chosen((second,), (first,), LARGE, None)  # type: ignore[arg-type]

    assert try_cuts([graph], search()).cuts == (second,)  # type: ignore[list-item]
    assert (graph.begun, graph.compiled) == (["first", "second"], ["second"])


def test_what_a_search_raises_while_a_cut_is_compiled_arrives_as_it_is() -> None:
    graph, (first,) = _Graph(), _cuts("first")

    def search() -> Generator[Any, None, Chosen]:
        yield (first,)
        raise BudgetError("too small", 800)

    with pytest.raises(BudgetError, match="too small"):
        try_cuts([graph], search())  # type: ignore[list-item]
    assert graph.compiled == []


def _cuts(*ways: str) -> list[Any]:
    return [SimpleNamespace(way=way, code=_Code()) for way in ways]
