"""What a limit's budget is of, and what follows a refused one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from small_model import batch, needs_meter, small

import lowtide
from lowtide import BudgetError
from lowtide.integrations.peaks import Peaks
from lowtide.meter import peak, resident_bytes


@needs_meter
def test_a_share_is_of_the_step_of_the_optimizer_where_that_takes_more() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # the update has copies of its own
    handle: Any = lowtide.limit_memory(model, "100%", optimizer=optimizer)
    gc.collect()  # what earlier tests left would be freed within the block
    with peak("cpu") as whole:
        standing = resident_bytes(model) - whole.live_bytes
        for _ in range(3):
            model(batch(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert handle.plan.changes_nothing
    assert handle.plan.plain_peak_bytes < standing + whole.peak_bytes <= 1.001 * handle.plan.budget_bytes
    handle.set_budget("90%")
    with pytest.raises(BudgetError, match=r"optimizer\.step"):
        model(batch(2))


@needs_meter
def test_after_a_refusal_another_budget_is_planned_for_from_the_step_that_was_refused() -> None:
    model = small()
    handle: Any = lowtide.limit_memory(model, "1KiB", progress=False)
    looks = lambda: sum(entry.profiles for entry in handle._limiter.cache.known.values())  # noqa: E731
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
