"""Layers left out by Python's or NumPy's random numbers: a plan is for the most that may run, and nobody's random stream moves."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide import meter
from lowtide.trace.chance import Chance, same_random

LAYERS = 4


class LeavesOut(nn.Module):
    """Leaves layers out: for a low number, or for a high one."""

    def __init__(self, draw: Callable[[nn.Module], float], low: bool, **own: Any) -> None:
        super().__init__()
        self.draw, self.low = draw, low
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(LAYERS)])
        for name, item in own.items():
            setattr(self, name, item)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if (self.draw(self) > 0.5) == self.low:
                x = x + layer(x)
        return x.square().mean()


SOURCES: dict[str, Callable[[bool], LeavesOut]] = {
    "python": lambda low: LeavesOut(lambda _: random.random(), low),
    "python uniform": lambda low: LeavesOut(lambda _: random.uniform(0, 1), low),
    "python choice": lambda low: LeavesOut(lambda _: random.choice([0.1, 0.9]), low),
    "python integers": lambda low: LeavesOut(lambda _: random.randint(0, 1), low),
    "numpy": lambda low: LeavesOut(lambda _: np.random.rand(), low),
    "numpy uniform": lambda low: LeavesOut(lambda _: np.random.uniform(0, 1), low),
    "own python": lambda low: LeavesOut(lambda m: m.rng.random(), low, rng=random.Random(3)),
    "own numpy": lambda low: LeavesOut(lambda m: m.rng.rand(), low, rng=np.random.RandomState(3)),
    "own torch": lambda low: LeavesOut(lambda m: float(torch.rand(1, generator=m.rng)), low, rng=torch.Generator()),
}


def gelus(handle: Any) -> int:
    return sum(operation.name == "aten.gelu.default" for operation in handle.graph.operations)


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_a_plan_is_for_the_most_that_chance_may_let_run(source: str, low: bool) -> None:
    handle = lowtide.limit_memory(SOURCES[source](low), "95%")
    handle.prepare(torch.randn(50, 32))
    assert handle.graph is not None
    assert gelus(handle) == LAYERS
    assert handle.graph.source == "fake"


@pytest.mark.skipif(not meter.available(), reason="needs the counting allocator")
def test_steps_fit_and_are_bitwise_whatever_is_left_out(same: Callable[..., bool]) -> None:
    torch.manual_seed(0)
    plain, x = SOURCES["python"](True), torch.randn(200, 32)
    model = copy.deepcopy(plain)
    handle = lowtide.limit_memory(model, "70%")
    for seed in range(8):

        def step(of: nn.Module, seed: int = seed) -> None:
            random.seed(seed)
            loss = of(x)
            if loss.requires_grad:
                loss.backward()

        taken = meter.resident_bytes(model) + x.nbytes + meter.measure(lambda: step(model), timeline=False).peak_bytes
        after = random.getstate()
        step(plain)
        assert after == random.getstate()
        assert handle.plan is not None
        assert handle.plan.budget_bytes is not None
        assert taken <= handle.plan.budget_bytes, seed
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert same(a.grad, b.grad)
            a.grad = b.grad = None
    assert len(handle.plans) == 1


@pytest.mark.parametrize("source", SOURCES)
def test_no_random_stream_moves(source: str) -> None:
    untouched, looked_at = SOURCES[source](True), SOURCES[source](True)
    random.seed(5)
    np.random.seed(5)
    expected = [untouched.draw(untouched) for _ in range(700)]
    random.seed(5)
    np.random.seed(5)
    handle = lowtide.limit_memory(looked_at, "95%")
    handle.prepare(torch.randn(50, 32))
    assert [looked_at.draw(looked_at) for _ in range(700)] == expected


def test_a_generator_without_a_settable_stream_is_put_back() -> None:
    rng = np.random.default_rng(3)
    model = LeavesOut(lambda m: m.rng.random(), True, rng=rng)
    lowtide.limit_memory(model, "95%").prepare(torch.randn(50, 32))
    assert rng.random() == np.random.default_rng(3).random()


def test_whoever_draws_until_a_number_fits_ends() -> None:
    for least in (True, False):
        with same_random(chance=Chance(least)):
            assert -10 < np.random.normal() < 10
            assert -10 < random.normalvariate() < 10
            assert sorted(np.random.permutation(5)) == list(range(5))
            assert random.randint(0, 6) in range(7)


class Mixes(nn.Module):
    """Makes no sense of numbers at the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = random.random()
        if not 0.0 < number < 0.999:
            raise ValueError("a number that never comes")
        return (number * self.lin(x)).square().mean()


def test_a_model_that_makes_no_sense_of_the_extremes_is_traced_as_numbers_come() -> None:
    random.seed(1)
    model, state = Mixes(), random.getstate()
    handle = lowtide.limit_memory(model, "110%")
    handle.prepare(torch.randn(50, 32))
    assert handle.graph is not None
    assert handle.graph.source == "fake"
    assert random.getstate() == state


@pytest.mark.skipif(not meter.available(), reason="needs the counting allocator")
def test_random_states_take_no_memory_meanwhile() -> None:
    with meter.peak("cpu") as seen, same_random():
        torch.rand(3)
        assert seen.live_bytes == 0
