"""Training code as strangers write it: each pattern leaves the same bits limited as plain, in three steps."""

from __future__ import annotations

from collections.abc import Callable

import patterns_gradients
import patterns_loops
import patterns_modules
import pytest
from compare import check

PATTERNS = {**patterns_loops.PATTERNS, **patterns_gradients.PATTERNS, **patterns_modules.PATTERNS}
UNPLANNED = {"inference only", "nested limits"}  # nothing is trained; the outer limit decides for the inner


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name: str, one_rank: Callable[[], None]) -> None:
    if name == "distributed data parallel":
        one_rank()
    check(PATTERNS[name], planned=name not in UNPLANNED)
