"""BigScience's runs of Megatron-DeepSpeed on 384 A100 before BLOOM's: tokens a second."""

from __future__ import annotations

import pytest
from benchmarks.estimate_published import Run
from published_runs import check_speed, name, unfitted

MISSED_SPEED = {
    "a100_14336x72_dp8_tp8_pp6_mbs4_gbs1568": +34,
    "a100_14336x72_dp12_tp8_pp4_mbs2_gbs2016": +24,
    "a100_14336x72_dp24_tp8_pp2_mbs1_gbs2016": +44,
    "a100_14336x72_dp24_tp8_pp2_mbs2_gbs2016": +34,
    "a100_13312x84_dp8_tp8_pp6_mbs2_gbs2048": +22,
}


@pytest.mark.parametrize("run", unfitted("deepspeed"), ids=name)
def test_tokens_a_second(run: Run) -> None:
    check_speed(run, MISSED_SPEED)
