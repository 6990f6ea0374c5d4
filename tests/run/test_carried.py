"""A step that was planned before, in another process or for another limit, is planned without a search."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_model import batch, small

import lowtide


def run(budget: str) -> tuple[lowtide.Handle, list[torch.Tensor]]:
    model = small(layers=6)
    handle = lowtide.limit_memory(model, budget)
    for step in range(3):
        torch.manual_seed(step)
        model.zero_grad()
        model(batch()).backward()
    handle.remove()
    return handle, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_the_second_time_nothing_is_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("60%")[0].plannings == 1  # nothing is kept, and what has to be compiled is
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    first, expected = run("60%")
    again, found = run("60%")
    assert (first.plannings, again.plannings) == (1, 0)
    assert first.plan is not None and again.plan is not None
    assert again.plan.budget_bytes == first.plan.budget_bytes
    assert again.plan.predicted_peak_bytes <= first.plan.budget_bytes
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
