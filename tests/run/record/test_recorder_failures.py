"""Promises 2 and 5: a failed step, a forward without backward, evaluation: nothing is left, and the next step
is a normal one.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from function_model import N, batch, make
from torch import nn

import lowtide
from lowtide.interception import interceptors


class Watched(nn.Module):
    """Keeps weak references to the storages of what it made, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(N, N) for _ in range(4)])
        self.norm = nn.BatchNorm1d(N)
        self.seen: list[Any] = []
        self.fail = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.nn.functional.gelu(layer(x))
            self.seen.append(weakref.ref(x.untyped_storage()))
            x = self.norm(x.exp()) * x
            self.seen.append(weakref.ref(x.untyped_storage()))
            if self.fail == "forward" and k == 2:
                raise KeyError("on demand")
        if self.fail == "backward":
            x = FailsBackward.apply(x)
        return x.sum()


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("on demand")


def alive(model: Watched) -> int:
    return sum(r() is not None for r in model.seen)


@pytest.mark.parametrize("fail", ["forward", "backward"])
@pytest.mark.parametrize("first_step", [True, False])
@pytest.mark.parametrize("way", ["limit", "scope"])
def test_a_failed_step_leaves_nothing_and_the_next_is_normal(
    twins: Any, fail: str, first_step: bool, way: str
) -> None:
    torch.manual_seed(0)
    pair = twins(Watched()) if way == "limit" else twins(Watched(), policy="keep_all")

    def run(model: nn.Module) -> torch.Tensor:
        if way == "scope" and model is pair.limited:
            with lowtide.checkpointing():
                return model(batch())
        return model(batch())

    if not first_step:
        pair.step(run)
    gc.collect()
    gc.disable()  # nothing may need the cycle collector
    try:
        for model in (pair.plain, pair.limited):
            model.zero_grad()
            model.seen.clear()
            model.fail = fail
            with pytest.raises(KeyError, match="on demand"):
                run(model).backward()
            model.fail = ""
            model.zero_grad()
        assert interceptors() == []
        assert alive(pair.limited) == alive(pair.plain) == 0
    finally:
        gc.enable()
    if first_step and way == "limit":  # it failed while it was traced, which moves no statistics
        pair.limited.load_state_dict(pair.plain.state_dict())
    for seed in range(2):
        pair.step(run, seed)


@pytest.mark.parametrize("way", ["limit", "scope"])
def test_forward_without_backward_holds_nothing(twins: Any, way: str) -> None:
    pair = twins(
        Watched(), policy="keep_all" if way == "scope" else None, budget="95%" if way == "limit" else None
    )
    model = pair.limited

    def run() -> torch.Tensor:
        if way == "scope":
            with lowtide.checkpointing():
                return model(batch())
        return model(batch())

    run()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            model.seen.clear()
            loss = run()
            del loss
            assert alive(model) == 0
    finally:
        gc.enable()


def test_saved_tensors_die_as_backward_goes(everything: Any) -> None:
    """After backward the loss is still held, and nothing else."""
    model = Watched()
    lowtide.limit_memory(model, policy=everything)
    for _ in range(3):
        model.seen.clear()
        loss = model(batch())
        loss.backward()
        assert alive(model) == 0
        del loss


def test_evicted_tensors_are_gone_after_forward(everything: Any) -> None:
    model = Watched()
    lowtide.limit_memory(model, policy=everything)
    for _ in range(3):
        model.seen.clear()
        loss = model(batch())
        assert alive(model) == 0
        loss.backward()


def test_evaluation_and_no_grad_run_plain(twins: Any, same: Any) -> None:
    pair = twins(Watched())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.manual_seed(0)
            a = pair.plain(batch())
            torch.manual_seed(0)
            b = pair.limited(batch())
        assert same(a.clone(), b.clone()) and pair.handle.plan is None
    pair.plain.eval()
    pair.limited.eval()
    pair.check(lambda m: m(batch()))


def test_switching_between_training_and_evaluation(twins: Any) -> None:
    pair = twins(Watched())
    pair.step(lambda m: m(batch()))
    for model in (pair.plain, pair.limited):
        model.eval()
        with torch.no_grad():
            model(batch())
        model.train()
    pair.step(lambda m: m(batch()), 1)
    assert len(pair.handle.plans) == 1


def test_frozen_model_runs_plain(same: Any) -> None:
    model = make().requires_grad_(False)
    handle = lowtide.limit_memory(model, "50%")
    x = batch().requires_grad_()
    model(x).backward()
    assert x.grad is not None and (handle.plan is None or handle.plan.budget_bytes)
