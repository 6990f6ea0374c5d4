"""Gradients that add up over several steps: what a refusal says of the later ones, and what holds for
them.
"""

from __future__ import annotations

import re

import pytest
import torch
from small_model import batch, needs_meter, small

import lowtide
from lowtide import BudgetError, meter

MICRO = 3


def refused(model: torch.nn.Module, budget: int) -> BudgetError:
    """What a step within this budget is refused with."""
    handle = lowtide.limit_memory(model, budget)
    with pytest.raises(BudgetError) as refusal:
        handle.prepare(batch())
    handle.remove()
    return refusal.value


def micro_steps(model: torch.nn.Module, budget: int) -> list[int]:
    """Peaks of the micro-steps of two optimizer steps within a budget, with what stands before them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lowtide.limit_memory(model, budget)
    data = batch()
    peaks = []
    for _ in range(2):
        for _ in range(MICRO):
            standing = meter.resident_bytes(model) + data.nbytes
            peaks.append(
                standing + meter.measure(lambda: (model(data) / MICRO).backward(), timeline=False).peak_bytes
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return peaks


@needs_meter
def test_a_refusal_says_what_later_steps_may_take_besides() -> None:
    model = small()
    gradients = sum(p.nbytes for p in model.parameters())
    refusal = refused(model, 1)
    said = re.search(r"those after the first take up to ([\d,]+) bytes more", str(refusal))
    assert said is not None and int(said[1].replace(",", "")) == gradients
    assert "At its peak stands" in refusal.detail and refusal.detail in str(refusal)
    assert refusal.smallest_bytes is not None
    budget = refusal.smallest_bytes + gradients
    assert max(micro_steps(model, budget)) <= budget


@needs_meter
def test_the_second_micro_step_is_refused_with_what_will_do_for_all() -> None:
    first = refused(small(), 1).smallest_bytes
    assert first is not None
    with pytest.raises(BudgetError) as refusal:
        micro_steps(small(), first)
    enough = refusal.value.smallest_bytes
    assert enough is not None and "those after the first" not in str(refusal.value)
    assert max(micro_steps(small(), enough)) <= enough


@needs_meter
def test_gradients_that_stand_before_the_first_step_have_all_told_at_once() -> None:
    model = small()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    enough = refused(model, 1).smallest_bytes
    assert enough is not None
    model.zero_grad(set_to_none=True)
    assert max(micro_steps(model, enough)) <= enough
