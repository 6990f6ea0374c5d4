"""LitGPT under FSDP2 on eight H100 (lightning-thunder, pull requests 940 and 1528): tokens a second."""

from __future__ import annotations

import pytest
from benchmarks.estimate_published import Run
from published_runs import check_speed, name, unfitted

MISSED_SPEED: dict[str, int] = {}


@pytest.mark.parametrize("run", unfitted("litgpt"), ids=name)
def test_tokens_a_second(run: Run) -> None:
    check_speed(run, MISSED_SPEED)
