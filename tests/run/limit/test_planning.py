"""Gradients that add up over several steps: what a refusal says of the later ones, and what holds for them;
what a budget is of, and what follows a refused one.
"""

from __future__ import annotations

import gc
import re
import warnings
from typing import Any

import pytest
import torch
from small_model import batch, needs_meter, small
from torch import nn

import lowtide
from lowtide import BudgetError, meter
from lowtide.budget import with_slack
from lowtide.integrations.peaks import Peaks
from lowtide.meter import peak, resident_bytes

MICRO = 3


def refused(model: torch.nn.Module, budget: int) -> BudgetError:
    """What a step within this budget is refused with."""
    handle = lowtide.limit_memory(model, budget)
    with pytest.raises(BudgetError) as refusal:
        handle.prepare(batch())
    handle.remove()
    return refusal.value


STATES = 1 << 14
"""Bytes of the random states that a step holds while it is looked at, of dropout's second runs."""


def micro_steps(model: torch.nn.Module, budget: int) -> list[int]:
    """Peaks of the micro-steps of two optimizer steps within a budget, with what is resident before them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lowtide.limit_memory(model, budget)
    data = batch()
    peaks = []
    for _ in range(2):
        for _ in range(MICRO):
            resident = meter.resident_bytes(model) + data.nbytes
            peaks.append(
                resident + meter.measure(lambda: (model(data) / MICRO).backward(), timeline=False).peak_bytes
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return peaks


@needs_meter
def test_a_refusal_says_what_later_steps_may_take_besides() -> None:
    model = small()
    gradients = sum(p.nbytes for p in model.parameters())
    refusal = refused(model, 101)
    said = re.search(r"steps after the first take up to [\d.]+ [KM]iB \(([\d,]+) bytes\) more", str(refusal))
    assert said is not None and int(said[1].replace(",", "")) == with_slack(gradients)
    assert "Its peak is at" in refusal.detail and refusal.detail in str(refusal)
    assert refusal.smallest_bytes is not None
    budget = refusal.smallest_bytes + with_slack(gradients)
    assert max(micro_steps(model, budget)) <= budget + STATES


@needs_meter
def test_the_second_micro_step_is_refused_with_what_will_do_for_all() -> None:
    first = refused(small(), 101).smallest_bytes
    assert first is not None
    with pytest.raises(BudgetError) as refusal:
        micro_steps(small(), first)
    enough = refusal.value.smallest_bytes
    assert enough is not None and "steps after the first" not in str(refusal.value)
    assert max(micro_steps(small(), enough)) <= enough + STATES


@needs_meter
def test_gradients_that_stand_before_the_first_step_have_all_told_at_once() -> None:
    model = small()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    enough = refused(model, 101).smallest_bytes
    assert enough is not None
    model.zero_grad(set_to_none=True)
    assert max(micro_steps(model, enough)) <= enough + STATES


class Recurrent(nn.Module):
    """A cell whose weights get a gradient from every step of its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(32, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 64)
        for item in x.unbind(1):
            state = self.cell(item, state)
        return self.head(state).square().mean()


@needs_meter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_are_used_many_times_at_the_smallest_budget(dtype: torch.dtype) -> None:
    """Their gradients meet in place, in bytes that are there until the last has come; and gates are written
    over parts of a storage that autograd has saved.
    """
    torch.manual_seed(0)
    model, x = Recurrent().to(dtype), torch.randn(8, 6, 32, dtype=dtype)
    handle = lowtide.limit_memory(model, "min", progress=False)
    taken = []
    with warnings.catch_warnings():
        for number in range(6):  # the first is looked at, and says what it took
            warnings.simplefilter("error" if number > 1 else "ignore", lowtide.LowtideWarning)
            if number % MICRO == 0:
                model.zero_grad(set_to_none=True)
            resident = meter.resident_bytes(model) + x.nbytes
            measured = meter.measure(lambda: model(x).backward(), timeline=False).peak_bytes
            assert handle.budget_bytes is not None and handle.plan is not None
            taken.append((resident + measured, handle.plan.predicted_peak_bytes, handle.budget_bytes))
    assert all(peak == foreseen <= budget for peak, foreseen, budget in taken[1:]), taken


@needs_meter
def test_the_smallest_budget_rises_where_a_step_needs_more() -> None:
    """A step that adds to gradients has them to hold beside it."""
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.GELU())))
    data = torch.randn(512, 64)
    handle = lowtide.limit_memory(model, "min", progress=False)
    model(data).sum().backward()
    first = handle.budget_bytes
    assert first is not None
    with pytest.warns(lowtide.LowtideWarning, match='the budget of "min" is .* a step needs more'):
        model(data).sum().backward()
    assert handle.budget_bytes is not None and handle.budget_bytes > first
    risen = handle.budget_bytes
    model.zero_grad()
    model(data).sum().backward()
    assert handle.budget_bytes == risen, "it never falls"


@needs_meter
def test_a_share_is_of_the_step_of_the_optimizer_where_that_takes_more() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # the update has copies of its own
    handle: Any = lowtide.limit_memory(model, "100%", optimizer=optimizer)
    gc.collect()  # what earlier tests left would be freed within the block
    with peak("cpu") as whole:
        resident = resident_bytes(model) - whole.live_bytes
        for _ in range(3):
            model(batch(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert handle.plan.changes_nothing
    assert handle.plan.plain_peak_bytes < resident + whole.peak_bytes <= 1.001 * handle.budget_bytes
    handle.set_budget("90%")
    with pytest.raises(BudgetError, match=r"optimizer\.step"):
        model(batch(2))


@needs_meter
def test_after_a_refusal_another_budget_is_planned_for_from_the_step_that_was_refused() -> None:
    model = small()
    handle: Any = lowtide.limit_memory(model, "1KiB", progress=False)
    looks = lambda: sum(entry.listened for entry in handle._limiter.book.known.values())  # noqa: E731
    for _ in range(2):  # the same budget: another step may be a shorter one
        with pytest.raises(BudgetError):
            model(batch()).backward()
        model.zero_grad()
    assert looks() == 2
    handle.set_budget("70%")
    model(batch()).backward()
    assert looks() == 2 and handle.plan is not None
    assert handle.measured_peak_bytes <= handle.plan.budget_bytes


@needs_meter
@pytest.mark.parametrize("budget", ["min", "70%", "64KiB"])
def test_what_is_logged_as_the_budget_does_not_move_with_the_kind_of_step(budget: str) -> None:
    model = small()
    handle: Any = lowtide.limit_memory(model, budget, progress=False)
    peaks = Peaks(handle)
    assert handle.budget_bytes == (1 << 16 if budget == "64KiB" else None)
    if budget == "64KiB":
        return
    own, logged = [], []
    for adds in (False, True, True, False, True):
        if not adds:
            model.zero_grad()
        model(batch()).backward()
        own.append(handle.plan.budget_bytes)
        logged.append(peaks.take()["memory_budget_mib"])
    assert len(set(own)) > 1, "each kind has a plan within a budget of its own"
    assert len(set(logged[1:])) == 1 and handle.budget_bytes == max(own)
    handle.set_budget("90%")
    assert handle.budget_bytes is None


def test_gradients_that_exist_before_are_counted_once() -> None:
    """They were counted again in a graph that an entry had from a sibling which had it from another."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    data = torch.randn(256, 64)
    handle = lowtide.limit_memory(model, "100%", progress=False)
    for existing in ((), ("0.",), (), ("0.", "1.", "2.", "3.")):
        for name, parameter in model.named_parameters():
            if not name.startswith(existing):
                parameter.grad = None
        resident = resident_bytes(model) + data.nbytes
        model(data).square().mean().backward()
    assert len(handle.plans) == 3 and handle.graph is not None
    assert handle.graph.resident_bytes == resident


@needs_meter
def test_preparing_lets_go_of_the_gradients_that_it_put_aside() -> None:
    model = small(width=64)
    handle: Any = lowtide.limit_memory(model, "100%", progress=False)
    model(batch(10, 64)).backward()
    gc.collect()
    gc.disable()
    try:
        with peak("cpu") as seen:
            before = seen.live_bytes
            handle.prepare(batch(20, 64))
            model.zero_grad()
            gradients = sum(parameter.nbytes for parameter in model.parameters())
            assert seen.live_bytes <= before - gradients / 2, "the gradients are gone"
    finally:
        gc.enable()
