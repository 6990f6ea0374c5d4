"""torchtitan's benchmarks of Llama 2 and 3 on H100, H200 and A100: tokens a second and reserved memory."""

from __future__ import annotations

import pytest
from benchmarks.estimate_published import Run
from published_runs import check_memory, check_speed, name, unfitted

MISSED_SPEED = {
    "h100-96gb_8B_CP_4_131072": +19,
    "h100-96gb_8B_CP_8_262144": +23,
    "h100-96gb_405B_4D_CP_8_262144": +24,
    "h100-96gb_405B_FSDP_16_TP_8_+_float8": -31,
}
MISSED_MEMORY = {
    "h100-96gb_70B_FSDP_32_TP_8": -8,
    "h100-96gb_405B_3D_1F1B": -9,
    "h100-96gb_405B_4D_CP_8_262144": -11,
    "h200_8B_H200_float8_x64": -10,
}


@pytest.mark.parametrize("run", unfitted("torchtitan"), ids=name)
def test_tokens_a_second(run: Run) -> None:
    check_speed(run, MISSED_SPEED)


@pytest.mark.parametrize("run", unfitted("torchtitan"), ids=name)
def test_reserved_memory(run: Run) -> None:
    check_memory(run, MISSED_MEMORY)
