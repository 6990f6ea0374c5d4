"""Budgets are read exactly, and what is not understood is said with the forms that are."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.budget import format_bytes, parse
from lowtide.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("600MiB", 600 * 2**20),
        (" 6 GiB ", 6 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("1.5gib", 3 * 2**29),
        ("0.1KiB", 102),
        ("1000", 1000),
        ("1_000 B", 1000),
        ("12 bytes", 12),
        (".5MB", 500_000),
        (4096, 4096),
        (4096.0, 4096),
        ("2TiB", 2**41),
    ],
)
def test_sizes(text: Any, expected: int) -> None:
    assert parse(text) == expected


def test_percentages() -> None:
    assert parse("60%", 1000) == 600
    assert parse("33.3 %", 1000) == 333
    assert parse("100%", 12345678901234567) == 12345678901234567
    assert parse("120%", 1000) == 1200
    with pytest.raises(BudgetError, match=r"'60%'.*plain step's peak"):
        parse("60%")


@pytest.mark.parametrize(
    "text", ["", "abc", "6Gb/s", "-5MiB", "0", 0, -3, "0%", 1.5, float("nan"), float("inf"), True, None, "1.5", "6 elephants", "1e9"]
)
def test_malformed_budgets_quote_the_text_and_list_the_forms(text: Any) -> None:
    with pytest.raises(BudgetError) as caught:
        parse(text, 1000)
    assert repr(text) in str(caught.value)
    assert "600MiB" in str(caught.value)
    assert caught.value.smallest_bytes is None


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (600 * 2**20, "600 MiB"),
        (2**30, "1 GiB"),
        (int(5.367 * 2**30), "5.37 GiB"),
        (1023 * 2**20, "1 GiB"),
        (-(2**20), "-1 MiB"),
        (100 * 2**10, "100 KiB"),
    ],
)
def test_format_bytes(count: int, expected: str) -> None:
    assert format_bytes(count) == expected
