"""A model that keeps its own outputs, and so their history, is freed with its last reference, as in a plain
step: what autograd holds leads to no model.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

N = 16


class Fails(torch.autograd.Function):
    """Its backward raises an error."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a backward that fails")


class Shows(nn.Module):
    """Keeps what it makes."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(N, N), nn.Linear(N, N)
        self.fails = fails
        self.shown: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        t = h.tanh()
        u = self.out(Fails.apply(t) if self.fails else t)
        loss = u.sin().square().sum()
        self.shown = [h, t, u, loss]
        return loss


def writes(model: Shows) -> None:
    with torch.no_grad():
        model.shown[1].add_(1)


def nothing(model: Shows) -> None:
    pass


def gone(model: weakref.ref[nn.Module]) -> bool:
    gc.collect()
    return model() is None


@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(
    ("fails", "between"),
    [(False, nothing), (False, writes), (True, nothing)],
    ids=["ends", "wrote", "raises"],
)
def test_a_model_that_keeps_its_outputs_is_freed(fails: bool, between: Any, steps: int, verify: Any) -> None:
    def run() -> weakref.ref[nn.Module]:
        model = Shows(fails)
        lowtide.limit_memory(model, "100%" if fails else "min", verify=verify)
        for _ in range(steps):
            loss = model(torch.randn(8, N))
            between(model)
            with suppress(RuntimeError):
                loss.backward()
        return weakref.ref(model)

    assert gone(run())


@pytest.mark.parametrize("backwards", [0, 1, 2])
def test_it_is_freed_where_the_last_backward_never_runs(backwards: int) -> None:
    def run() -> weakref.ref[nn.Module]:
        model = Shows(fails=False)
        lowtide.limit_memory(model, "100%")
        for _ in range(backwards):
            model(torch.randn(8, N)).backward()
        model(torch.randn(8, N))
        return weakref.ref(model)

    assert gone(run())


def test_it_is_freed_under_a_plan_of_ones_own() -> None:
    def run() -> weakref.ref[nn.Module]:
        model, x = Shows(fails=False), torch.randn(8, N)
        plan = lowtide.plan(lowtide.trace(model, x), policy="full")
        with lowtide.apply(plan):
            model(x).backward()
        return weakref.ref(model)

    assert gone(run())
