"""A backward that fails half-way, its error and loss kept: what these hold counts in later budgets."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from small_model import needs_meter
from torch import nn

import lowtide

BUDGET = 10 * 2**20


class Fails(torch.autograd.Function):
    now = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Fails.now:
            raise ValueError("half-way")
        return gradient


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(Fails.apply(x) if number == 4 else x).sin().exp().tanh()
        return x.square().sum()


@needs_meter
@pytest.mark.parametrize("failing", [0, 2])
def test_later_steps_keep_the_budget(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, kept = Deep(), torch.randn(512, 256), list[Any]()
    lowtide.limit_memory(model, BUDGET)

    def steps() -> None:
        for number in range(5):
            model.zero_grad()
            monkeypatch.setattr(Fails, "now", number == failing)
            loss = model(x)
            try:
                loss.backward()
            except ValueError as error:
                kept.extend((error, loss))

    there = sum(one.untyped_storage().nbytes() for one in (*model.parameters(), x))
    assert lowtide.measure(steps, timeline=False).peak_bytes + there <= BUDGET
    assert len(kept) == 2


class Halved(nn.Module):
    """Fails half-way through a large batch, as one that is out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == 5 and len(x) > 256:
                raise ValueError("too large")
            x = layer(x).sin().exp().tanh()
        return x.square().sum()


@needs_meter
def test_a_first_step_that_failed_and_is_kept_is_no_budget_of_the_halves_that_follow() -> None:
    """What it took before its budget was known is above none, and its model counts once."""
    model, x, kept = Halved(), torch.randn(512, 256), list[Any]()
    handle = lowtide.limit_memory(model, "min")

    def steps() -> None:
        try:
            model(x)
        except ValueError as error:
            kept.append(error)
        for half in x.split(256):
            model(half).backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    said = [str(one.message) for one in caught if "a step took" in str(one.message)]
    assert len(kept) == 1 and not said
    assert 8 * 256 * 256 * 4 < handle.budget_bytes < 8 * 2**20
