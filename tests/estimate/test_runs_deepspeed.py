"""BigScience's runs of Megatron-DeepSpeed on 384 A100 before BLOOM's: tokens a second."""

from __future__ import annotations

import pytest
from benchmarks.estimate_published import Run
from published_runs import check_speed, name, unfitted

MISSED_SPEED = {
    "a100_14336x72_dp8_tp8_pp6_mbs4_gbs1568": +36,
    "a100_14336x72_dp8_tp8_pp6_mbs6_gbs2016": +15,
    "a100_14336x72_dp4_tp8_pp12_mbs2_gbs1568": +16,
    "a100_14336x72_dp4_tp8_pp12_mbs2_gbs2048": +16,
    "a100_14336x72_dp12_tp8_pp4_mbs2_gbs2016": +27,
    "a100_14336x72_dp24_tp8_pp2_mbs1_gbs2016": +48,
    "a100_14336x72_dp24_tp8_pp2_mbs2_gbs2016": +38,
    "a100_14336x72_dp16_tp4_pp6_mbs2_gbs2048": +15,
    "a100_13312x84_dp8_tp8_pp6_mbs2_gbs2048": +24,
}


@pytest.mark.parametrize("run", unfitted("deepspeed"), ids=name)
def test_tokens_a_second(run: Run) -> None:
    check_speed(run, MISSED_SPEED)
