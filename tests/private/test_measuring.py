"""The CUDA allocator knows what `lowtide.private.measuring` asks."""

from __future__ import annotations

import pytest
import torch

from lowtide import private


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_cuda_allocators_history() -> None:
    assert not private.is_cuda_history_recorded()
    private.record_cuda_history(1000)
    try:
        assert private.is_cuda_history_recorded()
        torch.ones(1000, device="cuda")
        (first, *_), *_ = private.cuda_history_events()
        assert {"action", "size", "time_us"} <= set(first)
    finally:
        private.stop_cuda_history()
    assert not private.is_cuda_history_recorded()


def test_the_names_of_the_cuda_allocators_history_are_there() -> None:
    """Without a GPU they cannot be called."""
    assert callable(torch._C.__dict__.get("_cuda_isHistoryEnabled", private.is_cuda_history_recorded))
    assert callable(torch.cuda.memory._record_memory_history) and callable(torch.cuda.memory._snapshot)
    assert callable(torch.cuda._sleep)  # pyright: ignore


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_occupied_while_the_host_goes_on() -> None:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    private.occupy_gpu(200_000)
    last.record()
    assert not last.query()
    last.synchronize()
    assert 0.05 < first.elapsed_time(last) < 5
