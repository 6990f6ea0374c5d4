"""The profiler and the CUDA allocator know what `lowtide.private.measuring` asks."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lowtide import accelerator, private


def test_the_profiler_is_known_and_its_events_name_their_device() -> None:
    assert not private.is_profiler_enabled()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watch:
        assert private.is_profiler_enabled()
        torch.ones(1000)
    events = [e for e in watch.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events and all(event.device_type() == private.cpu_device_type for event in events)


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


def test_where_cuda_is_not_initialized_its_allocator_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> bool:
        raise AssertionError("PyTorch crashes here")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", crash, raising=False)
    assert not private.is_cuda_history_recorded()


def test_the_names_of_the_cuda_allocators_history_are_there() -> None:
    """Without a GPU they cannot be called."""
    assert callable(torch._C.__dict__.get("_cuda_isHistoryEnabled", private.is_cuda_history_recorded))
    assert callable(torch._C.__dict__.get("_cuda_memorySnapshot", private.cuda_history_events))
    assert callable(torch.cuda.memory._record_memory_history) and callable(torch.cuda.memory._snapshot)
    assert callable(torch.cuda._sleep)  # pyright: ignore


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_who_observes_that_cuda_is_out_of_memory_is_called() -> None:
    torch.cuda.init()
    asked: list[tuple[int, int]] = []
    private.on_cuda_out_of_memory(lambda device, bytes_: asked.append((device, bytes_)))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
    assert asked == [(0, 1 << 46)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_occupied_while_the_host_goes_on() -> None:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    private.occupy_gpu(200_000, torch.device("cuda"))
    last.record()
    assert not last.query()
    last.synchronize()
    assert 0.05 < first.elapsed_time(last) < 5


GPU = torch.device("cuda:0")
MIB = 1 << 20


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of capability 9.0, and nothing set in the environment."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


def test_workspaces_of_cublas_where_pytorch_tells_their_size(cublas: pytest.MonkeyPatch) -> None:
    cublas.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 77, raising=False)
    assert private.blas_workspace_bytes(GPU) == 77
    cublas.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    assert private.blas_workspace_bytes(GPU) == 77 + MIB
    assert private.blas_workspace_bytes(torch.device("cpu")) == 0


def test_workspaces_of_cublas_where_pytorch_does_not(cublas: pytest.MonkeyPatch) -> None:
    cublas.delattr(torch.backends.cuda, "cublas_workspace_size", raising=False)
    assert private.blas_workspace_bytes(GPU) == 33 * MIB  # one of them is cuBLASLt's
    cublas.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert private.blas_workspace_bytes(GPU) == 8_519_680 + MIB
    cublas.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    cublas.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert private.blas_workspace_bytes(GPU) == (128 << 10) + 4 * MIB
    cublas.setattr(torch.version, "cuda", None)
    assert private.blas_workspace_bytes(GPU) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_workspaces_of_cublas_are_what_a_first_product_leaves() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.memory_allocated()
        private.take_blas_workspaces(GPU)
        assert torch.cuda.memory_allocated() - before == private.blas_workspace_bytes(GPU)
        private.take_blas_workspaces(GPU)
        assert torch.cuda.memory_allocated() - before == private.blas_workspace_bytes(GPU)


def test_a_capture_is_asked_about_only_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not accelerator.is_capturing()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert accelerator.is_capturing()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_capture_is_seen() -> None:
    graph = torch.cuda.CUDAGraph()
    torch.ones(1, device="cuda")
    assert not accelerator.is_capturing()
    with torch.cuda.graph(graph):
        torch.ones(1, device="cuda")
        assert accelerator.is_capturing()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_state_of_the_cuda_allocator() -> None:
    held = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    settings, segments = private.cuda_allocator_state(held.device)
    assert {"expandable_segments", "max_split_size", "garbage_collection_threshold"} <= settings.keys()
    assert len(settings["roundup_power2_divisions"]) == 16
    assert sum(segment["total_size"] for segment in segments) == torch.cuda.memory_reserved(held.device)
    blocks = [block for segment in segments for block in segment["blocks"]]
    assert {"size", "requested_size", "state"} <= blocks[0].keys()
    assert any(block["requested_size"] == held.nbytes for block in blocks)
