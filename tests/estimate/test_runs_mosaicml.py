"""MosaicML's benchmarks of MPT models on H100 and A100 (llm-foundry, scripts/train/benchmarking): tokens a
second.
"""

from __future__ import annotations

import pytest
from benchmarks.estimate_published import Run
from published_runs import check_speed, name, unfitted

MISSED_SPEED = {
    "h100_mpt-30b_8192_x8": +26,
    "a100_mpt-30b_8192_x8": +28,
    "a100_mpt-760m_1024_x8": +18,
    "a100_mpt-760m_512_x8": +24,
    "a100-40gb_mpt-70b_2048_x64": +40,
    "a100-40gb_mpt-13b_8192_x8": +15,
    "a100-40gb_mpt-13b_2048_x8": +17,
    "a100-40gb_mpt-13b_1024_x8": +17,
    "a100-40gb_mpt-13b_512_x8": +16,
    "a100-40gb_mpt-1b_2048_x32": +25,
}


@pytest.mark.parametrize("run", unfitted("mosaicml"), ids=name)
def test_tokens_a_second(run: Run) -> None:
    check_speed(run, MISSED_SPEED)
