"""Bytes, times and counts as people read them."""

from __future__ import annotations

import pytest

from lowtide.budget import format_bytes
from lowtide.words import seconds_text, seconds_texts


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


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((0.868, 1.001), ("868 ms", "1,001 ms")),
        ((1.5, 0.0123), ("1,500.0 ms", "12.3 ms")),
        ((9.996, 45.0), ("10.0 s", "45.0 s")),
        ((0.00123, 0.00123), ("1.23 ms", "1.23 ms")),
        ((30.0, 75.0), ("30.0 s", "75.0 s")),
        ((75.0, 90.0), ("1 min 15 s", "1 min 30 s")),
        ((0.0, 1e-7), ("0 ms", "0 ms")),
        ((1.04,), ("1.04 s",)),
    ],
)
def test_seconds_that_are_compared_have_one_unit(seconds: tuple[float], expected: tuple[str]) -> None:
    assert seconds_texts(*seconds) == expected


@pytest.mark.parametrize("exponent", range(-12, 6))
def test_seconds_are_no_powers_of_ten(exponent: int) -> None:
    assert "e" not in seconds_text(1.234 * 10.0**exponent)
