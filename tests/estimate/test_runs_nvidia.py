"""NVIDIA's performance summaries (NeMo 24.07 and 24.12, Megatron-Bridge 25.09 to 26.02): tokens a second."""

from __future__ import annotations

import pytest
from benchmarks.estimate_published import Run
from published_runs import check_speed, name, unfitted

MISSED_SPEED = {
    "h100_24.07_gpt3-5b_x64": +24,
    "h100_24.07_nemotron-8b_x64": +17,
}


@pytest.mark.parametrize("run", unfitted("nvidia"), ids=name)
def test_tokens_a_second(run: Run) -> None:
    check_speed(run, MISSED_SPEED)
