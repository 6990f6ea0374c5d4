"""KempnerForge's Llamas of 7B to 70B on 1 to 160 H200, in bfloat16: tokens a second and allocated memory."""

from __future__ import annotations

import pytest
from benchmarks.estimate_published import Run
from published_runs import check_memory, check_speed, name, unfitted

MISSED_SPEED = {
    "h200_April_7B_FSDP_1_TP_2": +23,
    "h200_April_7B_FSDP_2_TP_2": +18,
    "h200_April_7B_FSDP_8_TP_4": +20,
    "h200_April_70B_FSDP_8_TP_4": +39,
    "h200_June_70B_FSDP_2_TP_4": +90,
    "h200_June_70B_FSDP_8_TP_4": +32,
    "h200_June_70B_FSDP_16_TP_4": +36,
    "h200_June_70B_FSDP_24_TP_4": +40,
    "h200_June_70B_FSDP_32_TP_4": +39,
    "h200_June_70B_FSDP_40_TP_4": +42,
}
MISSED_MEMORY = {
    "h200_April_7B_FSDP_2_TP_1": +20,
    "h200_April_7B_FSDP_1_TP_2": -17,
    "h200_April_7B_FSDP_1_TP_4": -20,
    "h200_April_7B_FSDP_2_TP_4": -7,
    "h200_April_13B_FSDP_2_TP_4": -6,
    "h200_April_7B_FSDP_4_TP_4": -6,
    "h200_April_13B_FSDP_4_TP_4": -5,
    "h200_June_13B_FSDP_2_TP_4": -6,
}


@pytest.mark.parametrize("run", unfitted("kempner"), ids=name)
def test_tokens_a_second(run: Run) -> None:
    check_speed(run, MISSED_SPEED)


@pytest.mark.parametrize("run", unfitted("kempner"), ids=name)
def test_allocated_memory(run: Run) -> None:
    check_memory(run, MISSED_MEMORY)
