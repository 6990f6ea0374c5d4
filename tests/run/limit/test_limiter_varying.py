"""Models whose steps run other operations each time keep their budget without a plan for each."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from benchmarks.sharded_models import WIDTH, Mixture
from benchmarks.varying import budgets_of, holds, row_of
from benchmarks.varying_kinds import KINDS, batch_of, draws_of, run, same
from small_model import needs_meter
from torch import nn

import lowtide
from lowtide.run.limit.entry import State

QUICKLY = lowtide.policies.optimal(0.05)  # seconds that a search takes


@needs_meter
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_steps_that_vary_keep_the_budget_bitwise(kind: Any) -> None:
    draws, plain, model, above = draws_of(kind, 12), kind(), kind(), []
    peaks = []
    for number, how in enumerate(draws):
        plain.zero_grad()
        peaks.append(lowtide.measure(lambda n=number, how=how: run(plain, batch_of(n), how)).peak_bytes)
    budget = int(0.6 * (max(peaks) + lowtide.meter.resident_bytes(kind())))
    handle = lowtide.limit_memory(model, budget, policy=QUICKLY, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        for number, how in enumerate(draws):
            x = batch_of(number)
            assert same(run(plain, x, how), run(model, x, how))
            assert handle.measured_peak_bytes is not None
            above += [number] if handle.measured_peak_bytes > 1.002 * budget else []
    (entry,) = handle._limiter.book.known.values()
    assert entry.state is State.PLANNED and entry.listened <= 4
    assert not above


@pytest.mark.slow
@needs_meter
@pytest.mark.parametrize("share", ["60%", "1.1 min"])
@pytest.mark.parametrize("name", KINDS)
def test_two_hundred_steps_that_vary(name: str, share: str) -> None:
    draws = draws_of(KINDS[name], 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        row = row_of(name, share, budgets_of(KINDS[name], draws)[share], draws)
    assert holds(row), row


class Gated(nn.Module):
    """Layers of which the step says how many run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU()) for _ in range(4))
        self.back = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for layer in self.layers[:count]:  # pyright: ignore
            x = x + self.back(layer(x))
        return x.square().mean()


def limited(counts: list[int], **options: Any) -> tuple[Any, lowtide.Handle]:
    model = Gated()
    handle = lowtide.limit_memory(model, progress=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        for count in counts:
            model.zero_grad()
            model(torch.ones(100, 16), count).backward()
    entry = next(iter(handle._limiter.book.known.values()))
    return entry, handle


@needs_meter
def test_the_first_steps_keep_the_budget_as_well() -> None:
    """Each is longer than the one that was written down last, or is written down itself."""
    torch.manual_seed(0)
    model, x, peaks = Gated(), torch.randn(400, 16), []
    handle = lowtide.limit_memory(model, 600_000, policy=QUICKLY, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        for count in (1, 4, 2, 3):
            model.zero_grad()
            model(x, count).backward()
            peaks.append(handle.measured_peak_bytes or 0)
    (entry,) = handle._limiter.book.known.values()
    assert entry.listened == 2
    assert max(peaks) <= 600_000, peaks


@needs_meter
@pytest.mark.parametrize("shows", ["lengths", "random numbers"])
def test_the_first_planned_step_may_differ_though_no_operation_reads_values(shows: str) -> None:
    """Lengths become a list, or Python draws how many layers run; the second step is longer."""
    torch.manual_seed(0)
    model, x, drawn = Gated(), torch.randn(400, 16), iter((1, 4))
    layers = model.forward

    def forward(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if shows == "lengths":
            return layers(x, sum(lengths.tolist()))
        random.random()
        return layers(x + lengths.sum(), next(drawn))

    model.forward = forward  # pyright: ignore
    handle = lowtide.limit_memory(model, 600_000, policy=QUICKLY, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        for lengths in ([1, 0, 0, 0], [1, 1, 1, 1]):
            model.zero_grad()
            model(x, torch.tensor(lengths)).backward()
    assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= 1.002 * 600_000


@needs_meter
def test_what_a_plan_moves_stays_with_the_plan() -> None:
    entry, handle = limited([4, 4, 3], budget="min", policy=lowtide.policies.mixed("host", min_bytes=1))
    assert handle.plan is not None and handle.plan.moves
    assert entry.state is State.PLANNED


@needs_meter
def test_another_budget_and_the_next_micro_step_hold_as_well() -> None:
    model = Gated()
    handle = lowtide.limit_memory(model, "80%", progress=False)
    plain, x = Gated(), torch.ones(100, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        for step, count in enumerate([4, 3, 2, 4, 1, 4, 3, 4]):
            if step == 4:
                assert handle.plan is not None
                handle.set_budget(int(0.9 * (handle.plan.budget_bytes or 0)))
            if step % 2 == 0:
                model.zero_grad()
                plain.zero_grad()
            for one in (model, plain):
                one(x, count).backward()
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            assert all(a.grad is b.grad is None or torch.equal(a.grad, b.grad) for a, b in pairs)  # pyright: ignore
            assert handle.plan is not None and handle.measured_peak_bytes is not None
            if step > 4:
                assert handle.measured_peak_bytes <= 1.002 * (handle.plan.budget_bytes or 0)
    assert all(entry.state is State.PLANNED for entry in handle._limiter.book.known.values())


@needs_meter
def test_routed_tokens_keep_the_budget() -> None:
    """Each step sends other numbers of tokens to the experts, by the same operations."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Mixture() for _ in range(3)])
    handle = lowtide.limit_memory(model, "min", policy=QUICKLY, progress=False)
    took = []
    for seed in range(30):
        x = torch.randn(1, 512, WIDTH, generator=torch.Generator().manual_seed(seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lowtide.LowtideWarning)
            model(x).square().mean().backward()
        model.zero_grad()
        took.append(handle.measured_peak_bytes or 0)
    assert handle.budget_bytes is not None and max(took[1:]) <= handle.budget_bytes, (
        took,
        handle.budget_bytes,
    )
