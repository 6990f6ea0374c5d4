"""The counting allocator counts exactly: known allocations, frees across an uninstall, threads, and the same
bytes as the profiler."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.meter import MeterError, available, counting_allocator, measure, peak

needs_allocator = pytest.mark.skipif(not available(), reason="no C++ compiler here")


@pytest.mark.parametrize("source", [pytest.param("allocator", marks=needs_allocator), "profiler"])
def test_known_allocations_are_exact(source: Any) -> None:
    def step() -> torch.Tensor:
        kept = torch.empty(1001, dtype=torch.uint8)
        view = kept[3:500].view(7, 71)  # a view has no bytes of its own
        view.zero_()  # nor has an in-place operation
        gone = torch.empty(4000, dtype=torch.uint8)
        del gone
        kept.resize_(3001)  # a new block, while the old one is copied from
        return kept

    seen = measure(step, source=source)
    assert seen.source == source
    assert (seen.peak_bytes, seen.end_bytes) == (1001 + 4000, 3001)
    assert [live for _, live in seen.timeline if live > 900][:3] == [1001, 5001, 1001]
    assert max(live for _, live in seen.timeline) == seen.peak_bytes
    assert seen.timeline[-1][1] == seen.end_bytes
    assert all(b[0] >= a[0] >= 0 for a, b in zip(seen.timeline, seen.timeline[1:], strict=False))
    assert seen.value.untyped_storage().nbytes() == 3001


@needs_allocator
def test_resize_counts_both_blocks() -> None:
    tensor = torch.empty(0)
    with peak() as seen:
        tensor = torch.empty(1000, dtype=torch.uint8)
        tensor.resize_(5000)
        assert (seen.peak_bytes, seen.live_bytes) == (6000, 5000)
        tensor.untyped_storage().resize_(0)
        assert seen.live_bytes == 0


@needs_allocator
def test_blocks_keep_alignment_and_contents() -> None:
    with peak():
        for size in (1, 63, 64, 1000, 1 << 20, (1 << 22) + 5):
            assert torch.empty(size, dtype=torch.uint8).data_ptr() % 64 == 0
        assert torch.arange(1000).sum().item() == 499500
        assert torch.empty(0).numel() == 0


def _gpt_step() -> tuple[Any, ...]:
    torch.manual_seed(0)
    wide = 64
    layers = [
        nn.Sequential(
            nn.LayerNorm(wide),
            nn.Linear(wide, 4 * wide),
            nn.GELU(),
            nn.Linear(4 * wide, wide),
            nn.Dropout(0.1),
        )
        for _ in range(3)
    ]
    attend = nn.MultiheadAttention(wide, 4, batch_first=True)
    embed, head = nn.Embedding(300, wide), nn.Linear(wide, 300)
    model = nn.ModuleList([*layers, attend, embed, head])
    tokens = torch.randint(0, 300, (2, 64))

    def step() -> torch.Tensor:
        for p in model.parameters():
            p.grad = None
        h = embed(tokens)
        h = h + attend(h, h, h, need_weights=False)[0]
        for layer in layers:
            h = h + layer(h)
        loss = nn.functional.cross_entropy(head(h).flatten(0, 1), tokens.flatten())
        loss.backward()
        return loss.detach()

    return step, model


@needs_allocator
def test_agrees_with_the_profiler() -> None:
    step, model = _gpt_step()

    def forget() -> None:
        for p in model.parameters():
            p.grad = None

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the profiler does not see what OpenMP's other workers allocate
    try:
        step()
        forget()
        theirs = measure(step, source="profiler")
        forget()
        ours = measure(step, source="allocator")
        assert ours.peak_bytes == theirs.peak_bytes > 1_000_000
        assert ours.end_bytes == theirs.end_bytes
        assert [live for _, live in ours.timeline] == [live for _, live in theirs.timeline]
        forget()
        assert (
            measure(step, warmup=1, source="allocator").end_bytes == 4
        )  # all but the loss: the warm-up's gradients were freed, and that is counted
    finally:
        torch.set_num_threads(threads)


@needs_allocator
def test_profiler_reporting_keeps_working_under_the_allocator() -> None:
    with peak() as seen:
        theirs = measure(lambda: torch.empty(5000, dtype=torch.uint8), source="profiler")
        assert theirs.peak_bytes == 5000
        del theirs
        assert seen.peak_bytes == 5000


@needs_allocator
def test_blocks_outlive_the_allocator() -> None:
    allocator = counting_allocator()
    allocator.install()
    live = allocator.live_bytes
    kept = torch.ones(1000, dtype=torch.uint8)
    grows = torch.ones(1000, dtype=torch.uint8)
    assert allocator.live_bytes - live == 2000
    allocator.uninstall()
    assert allocator.installs == 0
    assert kept.sum().item() == 1000
    grows.resize_(100_000)
    del kept, grows
    assert allocator.live_bytes == live  # freed and counted by the block's own deleter
    torch.empty(777, dtype=torch.uint8)
    assert allocator.live_bytes == live


@needs_allocator
def test_uninstalling_what_is_not_installed_raises() -> None:
    with pytest.raises(MeterError, match="not installed"):
        counting_allocator().uninstall()


@needs_allocator
def test_onednn_workspaces_may_be_freed_by_either_allocator() -> None:
    convolution, image = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 32, 32, requires_grad=True)
    convolution(image).sum().backward()
    with peak():
        convolution(image).sum().backward()
        out = convolution(image).sum()
    out.backward()
    convolution(image).sum().backward()


@needs_allocator
def test_threads_count_exactly() -> None:
    rounds, size, workers = 300, 1000, 4
    kept: list[torch.Tensor] = []
    barrier = threading.Barrier(workers)

    def work() -> None:
        mine = []
        for at in range(rounds):
            block = torch.empty(size, dtype=torch.uint8)
            if at % 10 == 0:
                mine.append(block)
        kept.extend(mine)
        del block
        barrier.wait()

    with peak() as seen:
        threads = [threading.Thread(target=work) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen.live_bytes == workers * rounds // 10 * size
        assert seen.live_bytes <= seen.peak_bytes <= seen.live_bytes + 2 * workers * size
        kept.clear()
        assert seen.live_bytes == 0


@needs_allocator
def test_backward_on_other_threads_is_counted() -> None:
    seen: list[int] = []

    def work() -> None:
        x = torch.ones(1000, requires_grad=True)
        (x * x).sum().backward()

    with peak() as outer:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        seen.append(outer.peak_bytes)
    assert seen[0] >= 3 * 4000


def test_without_a_compiler_the_profiler_measures(tmp_path: Path) -> None:
    code = (
        "import torch; from lowtide.meter import available, measure, peak; assert not available()\n"
        "m = measure(lambda: torch.empty(9)); print(m.source, m.peak_bytes)\n"
        "with peak() as p: torch.empty(9)\n"
        "print(p.source, p.peak_bytes)"
    )
    place = {**os.environ, "LOWTIDE_CACHE": str(tmp_path / "cache"), "PATH": str(tmp_path), "CXX": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=place, capture_output=True, text=True, timeout=300, check=True
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("profiler")] == [
        "profiler 36",
        "profiler 36",
    ]


@needs_allocator
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_allocate() -> None:
    with peak():
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                torch.empty(100)

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for _ in range(5):
                child = os.fork()
                if child == 0:
                    torch.empty(1000)
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            thread.join()
