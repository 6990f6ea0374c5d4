"""The rows of one long sequence run, tiny; a forecast of the longest counts what grows and what does not."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu.long_context import SMALL, long_row
from benchmarks.gpu.rows import Where
from benchmarks.long_context_forecast import scaled

import lowtide


@pytest.mark.slow
@pytest.mark.parametrize("way", ["save_on_cpu", "recomputing", "all"])
def test_each_way_runs_at_every_length(way: str) -> None:
    row = long_row(way, Where("cpu", small=True))
    assert row["longest_tokens"] == SMALL[-1] and len(row["lengths"]) == len(SMALL)
    assert all(one["tokens_a_second"] > 0 for one in row["lengths"])


def test_a_scaled_step_grows_by_its_tokens_alone() -> None:
    layer = torch.nn.Linear(32, 32)
    short, long = (
        lowtide.trace(lambda x: layer(x).square().mean(), torch.randn(n, 32), model=layer, costs=False)
        for n in (64, 192)
    )
    assert sorted(s.bytes for s in scaled(short, 3.0).storages if s.bytes > 64) == sorted(
        s.bytes for s in long.storages if s.bytes > 64
    )
    grown = scaled(short, 3.0).operations
    assert [op.seconds for op in grown] == pytest.approx([3 * op.seconds for op in short.operations])
