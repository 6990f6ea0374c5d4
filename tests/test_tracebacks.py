"""A user's error shows where it was raised, and at most two frames of lowtide on the way."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

OURS = str(Path(lowtide.__file__).parent)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(8, 8), nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.second(x @ torch.zeros(3, 3) if self.fails else x).relu()


def frames_of(error: BaseException) -> list[str]:
    """The functions of lowtide that a traceback shows."""
    entries = traceback.extract_tb(error.__traceback__)
    assert entries[0].filename == __file__
    return [entry.name for entry in entries if entry.filename.startswith(OURS)]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("verify", ["first", "always"])
def test_an_operation_that_fails_in_a_limited_step(steps: int, verify: Any) -> None:
    model, x = Model(), torch.randn(64, 8)
    lowtide.limit_memory(model, "100%", verify=verify)
    for _ in range(steps):
        model(x).sum().backward()
    model.fails = True
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as failed:
        model(x)
    assert len(frames_of(failed.value)) <= 2
    assert traceback.extract_tb(failed.value.__traceback__)[-1].name == "forward", "where it was raised"


def test_other_arguments_than_the_forward_takes() -> None:
    model = Model()
    lowtide.limit_memory(model, "100%")
    with pytest.raises(TypeError, match="missing 1 required") as failed:
        model()
    assert len(frames_of(failed.value)) <= 2


def test_a_budget_that_no_plan_meets() -> None:
    model = Model()
    lowtide.limit_memory(model, "2KiB")
    with pytest.raises(lowtide.BudgetError) as failed:
        model(torch.randn(64, 8)).sum().backward()
    assert len(frames_of(failed.value)) <= 2


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: lowtide.trace(lambda: model(x).sum()),
        lambda model, x: lowtide.measure(lambda: model(x).sum()),
        lambda model, x: lowtide.checkpoint(model, x),
        lambda model, x: lowtide.limit_memory(model, "100%", loss_fn=torch.sum).prepare(x),
    ],
    ids=["trace", "measure", "checkpoint", "prepare"],
)
def test_other_ways_to_run_a_users_code(run: Callable[..., Any]) -> None:
    model = Model()
    model.fails = True
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as failed:
        run(model, torch.randn(64, 8))
    assert len(frames_of(failed.value)) <= 2
