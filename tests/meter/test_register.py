"""A peak counts one block of code: blocks nest and overlap, and each sees its own."""

from __future__ import annotations

import pytest
import torch

from lowtide.meter import MeterError, available, peak

needs_allocator = pytest.mark.skipif(not available(), reason="no C++ compiler here")


@needs_allocator
def test_nested_and_overlapping_peaks_see_their_own() -> None:
    first = peak()
    with first as outer:
        a = torch.empty(1000, dtype=torch.uint8)
        with peak() as inner:
            torch.empty(500, dtype=torch.uint8)
            assert inner.peak_bytes == 500
        assert (inner.peak_bytes, inner.live_bytes) == (500, 0)
        assert outer.peak_bytes == 1500
        later = peak().__enter__()
        torch.empty(100, dtype=torch.uint8)
        del a
        assert (later.peak_bytes, later.live_bytes) == (100, -1000)
    later.__exit__(None, None, None)
    assert (outer.peak_bytes, outer.live_bytes) == (1500, 0)
    with pytest.raises(MeterError, match="one block"):
        first.__enter__()


@needs_allocator
def test_too_many_peaks_at_once_raise_and_leave_nothing() -> None:
    open_ones = [peak() for _ in range(64)]
    for one in open_ones:
        one.__enter__()
    try:
        with pytest.raises(MeterError, match="64 peaks"):
            peak().__enter__()
    finally:
        for one in open_ones:
            one.__exit__(None, None, None)


def test_profiler_peak_is_known_after_the_block_only() -> None:
    with peak(source="profiler") as seen:
        torch.empty(3000, dtype=torch.uint8)
        with pytest.raises(MeterError, match="after the with-block"):
            _ = seen.peak_bytes
        with pytest.raises(MeterError, match="nested"):
            peak(source="profiler").__enter__()
    assert (seen.peak_bytes, seen.live_bytes) == (3000, 0)
