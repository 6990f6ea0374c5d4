"""IBM's fms-fsdp on 128 A100: tokens a second."""

from __future__ import annotations

import pytest
from benchmarks.estimate_published import Run
from published_runs import check_speed, name, unfitted

MISSED_SPEED: dict[str, int] = {}


@pytest.mark.parametrize("run", unfitted("fms_fsdp"), ids=name)
def test_tokens_a_second(run: Run) -> None:
    check_speed(run, MISSED_SPEED)
