"""InternLM of 7B on 8 to 1024 A100 (doc/en/train_performance.md): tokens a second."""

from __future__ import annotations

import pytest
from benchmarks.estimate_published import Run
from published_runs import check_speed, name, unfitted

MISSED_SPEED = {
    "a100_7B_tp1_zero1=-1_x128": +15,
    "a100_7B_tp1_zero1=-1_x256": +28,
    "a100_7B_tp1_zero1=-1_x512": +44,
    "a100_7B_tp1_zero1=-1_x1024": +81,
    "a100_7B_tp2_zero1=-1_x128": +18,
    "a100_7B_tp2_zero1=-1_x256": +26,
    "a100_7B_tp2_zero1=-1_x512": +30,
    "a100_7B_tp2_zero1=-1_x1024": +40,
    "a100_7B_checkpointed_mbs2_x1024": +18,
    "a100_7B_accumulating_2_x512": +20,
    "a100_7B_accumulating_1_x1024": +31,
    "a100_7B_accumulating_2_x1024": +31,
}


@pytest.mark.parametrize("run", unfitted("internlm"), ids=name)
def test_tokens_a_second(run: Run) -> None:
    check_speed(run, MISSED_SPEED)
