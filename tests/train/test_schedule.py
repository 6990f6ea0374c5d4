"""The learning rate's course."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.train.schedule import FINAL_SHARE, learning_rate


@given(st.integers(1, 500), st.data())
def test_it_rises_to_the_peak_and_falls_to_a_tenth(steps: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps))
    rates = [learning_rate(step, steps, 1.0, warmup) for step in range(steps)]
    assert all(0 < rate <= 1.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if warmup:
        assert rates[warmup - 1] == 1.0
    if warmup < steps:
        assert rates[warmup] == 1.0
    if warmup < steps - 1:
        assert rates[-1] == pytest.approx(FINAL_SHARE)
