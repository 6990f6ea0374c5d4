"""Bytes, times and counts as people read them."""

from __future__ import annotations

import pytest

from lowtide.budget import format_bytes


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
