"""CUDA: several readers share the one peak statistic of a device, of what is allocated and of what is
reserved. The statistics are played here; on a CUDA machine they are real. The workspaces of cuBLAS are
resident on the threads of forward and backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.meter import measure, peak
from lowtide.meter.resident import resident_workspace_bytes, workspace_bytes


class Played:
    """A device's allocator statistics."""

    def __init__(self) -> None:
        self.live = self.most = self.blocks = self.most_blocks = 0
        self.reserved = self.most_reserved = 1 << 20
        self.initialized = False
        self.readings = 0
        self.backend = "native"

    def alloc(self, size: int, rest: int = 0) -> None:
        """``size`` bytes are asked for (or given back), in a block with a ``rest`` that is not split off."""
        self.live += size
        self.blocks += size + rest
        self.most, self.most_blocks = max(self.most, self.live), max(self.most_blocks, self.blocks)

    def reserve(self, size: int) -> None:
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)

    def stats(self, device: int) -> dict[str, Any]:
        self.readings += 1
        asked = (self.live, self.most) if self.backend == "native" else (0, 0)
        counts = {
            "requested_bytes": asked,
            "allocated_bytes": (self.blocks, self.most_blocks),
            "reserved_bytes": (self.reserved, self.most_reserved),
        }
        return {name: {"all": {"current": now, "peak": most}} for name, (now, most) in counts.items()}

    def initialize(self) -> None:
        self.initialized = True

    def reset(self, device: int) -> None:
        if not self.initialized:
            raise RuntimeError("Invalid device argument 0: did you call init?")
        self.most, self.most_blocks, self.most_reserved = self.live, self.blocks, self.reserved


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Played:
    card = Played()
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", card.stats)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: card.backend)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", card.reset)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", card.initialize)
    return card


def test_nested_registers_see_their_own_peaks(card: Played) -> None:
    card.alloc(100)
    with peak("cuda:0") as outer:
        card.alloc(900)
        card.alloc(-900)
        with peak("cuda:0") as inner:
            assert (outer.peak_bytes, outer.live_bytes) == (900, 0)
            card.alloc(50)
            assert (inner.peak_bytes, inner.live_bytes) == (50, 50)
            card.alloc(1000)
            card.alloc(-1000)
        card.alloc(5000)
        card.alloc(-5000)
    assert inner.peak_bytes == 1050
    assert (outer.peak_bytes, outer.live_bytes) == (5050, 50)


def test_the_allocator_is_asked_three_times_a_block(card: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time takes as long as a small kernel: when it begins, in it, and when it ends."""
    asked: list[int] = []
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda device: asked.append(1) or card.stats(device)
    )
    with peak("cuda:0") as seen:
        card.alloc(7)
        assert seen.live_bytes == 7
    assert seen.peak_bytes == 7 and len(asked) == 3


def test_what_the_allocator_reserved_stands_beside_what_was_allocated(card: Played) -> None:
    with peak("cuda:0") as outer:
        card.reserve(1000)
        with peak("cuda:0") as inner:
            card.reserve(500)
            card.reserve(-700)
        card.alloc(7)
        assert outer.peak_bytes == 7
    assert inner.reserved_bytes == outer.reserved_bytes == (1 << 20) + 1500
    with peak("cpu") as here:
        pass
    assert here.reserved_bytes is None


def test_cuda_is_initialized_before_anything_is_asked_of_its_allocator(
    card: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_recorded() -> bool:
        assert card.initialized, "PyTorch crashes here"
        return True

    monkeypatch.setattr("lowtide.private.is_cuda_history_recorded", is_recorded)
    with peak("cuda:0", timeline=True) as seen:
        card.alloc(5)
    assert seen.peak_bytes == 5


def test_bytes_are_those_requested_and_blocks_stand_beside_them(card: Played) -> None:
    """A plan counts requests: the rest of a block that is not split (up to 1 MiB) is no failed prediction."""
    card.alloc(1000, rest=24)
    with peak("cuda:0") as seen:
        card.alloc(20 << 20, rest=1 << 19)
        card.alloc(-(20 << 20), rest=-(1 << 19))
        assert (seen.peak_bytes, seen.live_bytes) == (20 << 20, 0)
    assert seen.allocated_bytes == (20 << 20) + (1 << 19)
    with peak("cpu") as here:
        pass
    assert here.allocated_bytes is None


def test_an_allocator_that_counts_no_requests_is_read_by_its_blocks(card: Played) -> None:
    card.backend = "cudaMallocAsync"
    with peak("cuda:0") as seen:
        card.alloc(1000, rest=24)
    assert seen.peak_bytes == seen.allocated_bytes == 1024


def test_a_reading_asks_the_allocator_once(card: Played) -> None:
    with peak("cuda:0") as seen:
        before = card.readings
        assert seen.peak_bytes == 0
        assert card.readings == before + 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_real_device() -> None:
    def step() -> torch.Tensor:
        kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
        return kept

    seen = measure(step, device="cuda", warmup=1)
    assert (seen.peak_bytes, seen.end_bytes) == ((1 << 20) + (1 << 22), 1 << 20)
    assert seen.source == "cuda"
    assert max(live for _, live in seen.timeline) == seen.peak_bytes
    with peak("cuda") as outer, peak("cuda") as inner:
        step()
    assert inner.peak_bytes == outer.peak_bytes == (1 << 20) + (1 << 22)


def test_a_cpu_has_no_workspaces() -> None:
    assert workspace_bytes(torch.device("cpu")) == resident_workspace_bytes(torch.device("cpu")) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_step_adds_no_workspaces() -> None:
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.memory_allocated()
        count = resident_workspace_bytes(torch.device("cuda"))
        assert torch.cuda.memory_allocated() - before == count == workspace_bytes(torch.device("cuda:0"))
        torch.autograd.grad((weight @ weight).sum(), weight)
        torch.autograd.grad(torch.nn.functional.linear(weight, weight, weight[0]).sum(), weight)
        assert torch.cuda.memory_allocated() - before == count
        assert resident_workspace_bytes(torch.device("cuda", 0)) == count
        assert torch.cuda.memory_allocated() - before == count
