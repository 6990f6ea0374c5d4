"""A search that ends early goes on in a process of its own, and its plan replaces the first one, once."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.plan.background import BackgroundSearch
from lowtide.run.limit import planning
from lowtide.run.profile.costs import MeasuredCost


class Chain(nn.Module):
    """Small operations whose search takes more than a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full((32, 64 + 8 * (k % 3)), 0.02)) for k in range(24)
        )
        self.backs = nn.ParameterList(
            nn.Parameter(torch.full((64 + 8 * (k % 3), 32), 0.02)) for k in range(24)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, back in zip(self.weights, self.backs, strict=True):
            x = x + torch.tanh(torch.sin(x @ weight) @ back)
        return x.square().mean()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No step waits for a search; every operation takes as long, so that each run finds the same plans."""
    monkeypatch.setattr(MeasuredCost, "read", lambda cost: (1e-5, cost.scratch_bytes, cost.blocks))
    monkeypatch.setattr(planning, "_SEARCH_SECONDS", 1e-6)
    monkeypatch.setattr(planning, "_SEARCH_STEPS", 0)
    yield


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def search_of(handle: lowtide.Handle) -> BackgroundSearch | None:
    (entry,) = handle._limiter.cache.known.values()
    assert entry.planned is not None
    return entry.planned.history.search


def test_a_better_plan_is_found_between_steps_and_replaces_the_first_once(hurried: None) -> None:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(64, 32)
    plain = step(model, x)
    handle = lowtide.limit_memory(model, "min")
    assert all(map(torch.equal, plain, step(model, x)))
    first, search = handle.plan, search_of(handle)
    assert first is not None and search is not None
    assert any("ended early" in note for note in first.notes)
    search.plan()  # waits for it
    assert all(map(torch.equal, plain, step(model, x)))
    better = handle.plan
    assert better is not None and search_of(handle) is None
    assert better.predicted_extra_seconds < first.predicted_extra_seconds and better.gap < first.gap
    assert better.budget_bytes == first.budget_bytes and not better.notes
    assert handle.measured_peak_bytes == better.predicted_peak_bytes <= (better.budget_bytes or 0)
    assert all(map(torch.equal, plain, step(model, x)))
    assert handle.plan is not None and handle.plan.stored == better.stored
    handle.remove()


def test_nothing_is_left_of_a_search_where_the_limit_goes(hurried: None) -> None:
    """Removed, given another budget, or its model let go of."""
    for end in ("remove", "set_budget", "forget"):
        model, x = Chain(), torch.randn(64, 32)
        handle = lowtide.limit_memory(model, "min")
        step(model, x)
        search = search_of(handle)
        assert search is not None
        pid, thread = search._process.pid, search._thread
        del search
        if end == "remove":
            handle.remove()
        elif end == "set_budget":
            handle.set_budget("100%")
            step(model, x)
            assert search_of(handle) is None
        else:
            del handle, model
        gc.collect()
        thread.join(20)
        assert gone(pid) and not thread.is_alive()


def test_a_search_ends_with_the_process_that_started_it() -> None:
    code = (
        "import os, sys, torch, lowtide\n"
        "from lowtide.plan.background import BackgroundSearch\n"
        "graph = lowtide.trace(lambda x: x.sin().sum(), torch.ones(4, requires_grad=True))\n"
        "print(BackgroundSearch(graph, 10**9)._process.pid, flush=True)\n"
        "os._exit(0)"
    )
    import subprocess
    import sys

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    until = time.monotonic() + 60
    while not gone(int(said)) and time.monotonic() < until:
        time.sleep(0.1)
    assert gone(int(said))


def test_a_search_that_is_done_in_time_has_no_process() -> None:
    model, x = Chain(), torch.randn(64, 32)
    handle = lowtide.limit_memory(model, "90%")
    step(model, x)
    assert handle.plan is not None
    assert (search_of(handle) is None) is not any("ended early" in note for note in handle.plan.notes)
    handle.remove()
