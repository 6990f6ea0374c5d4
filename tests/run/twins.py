"""What the tests of the executor share: run a plain and a limited twin of a model side by side and compare
them bit by bit.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowtide
from lowtide.graph import StepGraph
from lowtide.plan.data import Plan
from lowtide.plan.policies import make_plan
from lowtide.run.limit.entry import State

Step = Callable[[torch.nn.Module], torch.Tensor]


def evict_everything(graph: StepGraph, budget: int | None = None) -> Plan:
    """The policy that stores only what it has to."""
    return make_plan(graph, stored=(), policy="evict_everything", budget=budget)


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's elements, bit by bit."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal in type, shape and bits."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def assert_same_state(plain: torch.nn.Module, limited: torch.nn.Module) -> None:
    """Parameters, gradients and buffers of two models are equal bit by bit."""
    for (name, a), (_, b) in zip(plain.named_parameters(), limited.named_parameters(), strict=True):
        assert same_bits(a, b), f"parameter {name}"
        assert same_bits(a.grad, b.grad), f"gradient of {name}"
    for (name, a), (_, b) in zip(plain.named_buffers(), limited.named_buffers(), strict=True):
        assert same_bits(a, b), f"buffer {name}"


class Twins:
    """A model and its limited copy."""

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        self.plain = model
        self.limited = copy.deepcopy(model)
        if "budget" not in options:
            options.setdefault("policy", evict_everything)
        self.handle = lowtide.limit_memory(self.limited, **options)

    def step(self, run: Step, seed: int = 0, backward: bool = True, clear: bool = True) -> None:
        """One step of each from the same seed; everything that it leaves behind is equal."""
        results, states = [], []
        for model in (self.plain, self.limited):
            if clear:
                model.zero_grad(set_to_none=True)
            torch.manual_seed(seed)
            loss = run(model)
            if backward:
                loss.backward()
            results.append(loss.detach())
            states.append(torch.get_rng_state())
        assert same_bits(*results), f"loss {results}"
        assert same_bits(*states), "random state"
        assert_same_state(self.plain, self.limited)

    def check(self, run: Step, steps: int = 3, replayed: bool = True, **options: Any) -> lowtide.Handle:
        """Several steps; something was replayed and nothing had to be kept."""
        for seed in range(steps):
            self.step(run, seed=seed, **options)
        assert self.handle.plan is not None
        assert bool(self.handle.plan.replayed) is replayed
        assert all(entry.state is State.PLANNED for entry in self.handle._limiter.book.known.values())
        return self.handle


@pytest.fixture
def twins() -> type[Twins]:
    """`Twins`, for test modules that cannot import a conftest."""
    return Twins


@pytest.fixture
def everything() -> Callable[..., Plan]:
    """`evict_everything`."""
    return evict_everything


@pytest.fixture
def same() -> Callable[..., bool]:
    """`same_bits`."""
    return same_bits


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    """Whatever a test does, no dispatch mode and no saved-tensor hooks are left on this thread."""
    from lowtide.interception import interceptors

    yield
    if interceptors():
        gc.collect()  # an abandoned step may be garbage that waits for Python's collector
    assert interceptors() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
