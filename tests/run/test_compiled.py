"""Compiled submodules of a limited model stay compiled, and gradients stay the plain step's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

N = 16


class Backend:
    """Counts compilations and runs of what was compiled."""

    def __init__(self) -> None:
        self.compiled = 0
        self.ran = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return module(*args)

        return run

    def __deepcopy__(self, memo: Any) -> Backend:
        return self


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(N, 4 * N), nn.GELU(), nn.Linear(4 * N, N))
        self.middle: Any = nn.Sequential(nn.Linear(N, 4 * N), nn.Tanh(), nn.Linear(4 * N, N))
        self.last = nn.Sequential(nn.Linear(N, 4 * N), nn.GELU(), nn.Linear(4 * N, N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).exp()).sin()).square().sum()


def batch() -> torch.Tensor:
    return torch.randn(100, N, generator=torch.Generator().manual_seed(3))


def grads(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch()).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
@pytest.mark.parametrize("limit", ["full", "70%"])
def test_compiled_submodule_stays_compiled(same: Any, way: str, limit: str, everything: Any) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    backend = Backend()
    if way == "torch.compile":
        model.middle = torch.compile(model.middle, backend=backend)
    else:
        model.middle.compile(backend=backend)
    options: dict[str, Any] = {"policy": everything} if limit == "full" else {"budget": "80%"}
    handle = lowtide.limit_memory(model, **options)
    expected = grads(plain)
    assert all(map(same, expected, grads(model)))
    ran, compiled = backend.ran, backend.compiled
    for _ in range(4):
        assert all(map(same, expected, grads(model)))
    assert backend.ran == ran + 4, "one compiled run a step: not in eager, and not replayed"
    assert backend.compiled == compiled, "compiled once"
    assert handle.plan.replayed
    inside = {handle.graph.operations[i].module for i in handle.plan.replayed}
    assert not any("middle" in name for name in inside)


def test_limited_model_that_is_compiled_whole(same: Any) -> None:
    """Compiling around a limited model: right numbers; the limited forward itself is not compiled."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    lowtide.limit_memory(model, policy="full")
    whole = torch.compile(model, backend=Backend())
    expected = grads(plain)
    for _ in range(3):
        model.zero_grad()
        whole(batch()).backward()
        assert all(same(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))


def test_limit_on_a_compiled_model(same: Any) -> None:
    """The other way round: a compiled model is opaque as a whole; numbers are right or it says what to do."""
    torch.manual_seed(0)
    plain = Model()
    backend = Backend()
    model = torch.compile(copy.deepcopy(plain), backend=backend)
    expected = grads(plain)
    try:
        lowtide.limit_memory(model, policy="full")
        found = grads(model)
    except lowtide.LowtideError as error:
        assert "compile" in str(error)
        return
    assert all(map(same, expected, found))


def test_failure_in_a_compiled_submodule_leaves_no_mode(same: Any) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    backend = Backend()
    model.middle = torch.compile(model.middle, backend=backend)
    lowtide.limit_memory(model, policy="full")
    grads(model)
    fail = model.last[0].register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model(batch())
    fail.remove()
    with pytest.raises(Exception, match=r"shape|size|dimension|rank"):
        model(torch.randn(3, N + 1))
    assert all(map(same, grads(plain), grads(model)))
    assert not model.middle._forward_pre_hooks and not model.middle._forward_hooks


def test_compiled_function_in_forward(same: Any) -> None:
    """A compiled function is no module: numbers are right whether it runs compiled or not."""
    backend = Backend()

    @torch.compile(backend=backend)
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * x).sin()

    class Calls(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(function(self.first(x))).square().sum()

    torch.manual_seed(0)
    model = Calls()
    plain = copy.deepcopy(model)
    lowtide.limit_memory(model, policy="full")
    for _ in range(3):
        assert all(same(a, b) if a is not None else b is None for a, b in zip(some(plain), some(model), strict=True))


def some(model: nn.Module) -> list[Any]:
    model.zero_grad()
    model(batch()).backward()
    return [p.grad for p in model.parameters()]
