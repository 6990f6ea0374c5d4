"""The learning rate's course."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.train.schedule import FINAL_SHARE, SHAPES, make_schedule, share


@given(st.integers(1, 500), st.data())
def test_it_rises_to_the_peak_and_falls_to_a_tenth(steps: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps))
    rates = [share(step, steps, warmup) for step in range(steps)]
    assert all(0 < rate <= 1.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if warmup:
        assert rates[warmup - 1] == 1.0
    if warmup < steps:
        assert rates[warmup] == 1.0
    if warmup < steps - 1:
        assert rates[-1] == pytest.approx(FINAL_SHARE)


@pytest.mark.parametrize("shape", SHAPES)
def test_pytorchs_scheduler_goes_on_where_a_run_stopped(shape: str) -> None:
    def rates(done: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=7.0)
        schedule = make_schedule(optimizer, 2.0, done, steps=9, warmup=3, shape=shape)
        found = []
        for _ in range(done, 9):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    whole = rates(0)
    assert whole == [2.0 * share(step, 9, 3, shape) for step in range(9)]
    assert rates(5) == whole[5:]
    assert whole[-1] == pytest.approx(2.0 if shape == "constant" else 0.2)
