"""The rows of one long sequence run, tiny; a forecast of the longest counts what grows and what does not."""

from __future__ import annotations

import pytest
from benchmarks.gpu.long_context import SMALL, long_row
from benchmarks.gpu.rows import Where
from benchmarks.long_context_forecast import CARD, HOST_BYTES, longest, room


@pytest.mark.slow
@pytest.mark.parametrize("way", ["save_on_cpu", "recomputing", "all"])
def test_each_way_runs_at_every_length(way: str) -> None:
    row = long_row(way, Where("cpu", small=True))
    assert row["longest_tokens"] == SMALL[-1] and len(row["lengths"]) == len(SMALL)
    assert all(one["tokens_a_second"] > 0 for one in row["lengths"])


def test_the_longest_sequence_is_the_shorter_of_what_the_card_and_main_memory_hold() -> None:
    fixed, tokens = (8 << 30) + CARD.workspaces_bytes, 1000
    free = room() - fixed
    assert longest(tokens, fixed, fixed + free, 0) == tokens
    assert longest(tokens, fixed, fixed + free // 2, 0) == pytest.approx(2 * tokens, rel=0.2)
    assert longest(tokens, fixed, fixed + free // 2, HOST_BYTES) == tokens
