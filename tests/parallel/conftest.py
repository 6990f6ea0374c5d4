"""Makes the helpers of this folder and the benchmarks importable, and does once what processes that are made
here need not do each.
"""

import sys
from pathlib import Path

import pytest

import lowtide.limits
from lowtide.run.record.native import native_recorder

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]


@pytest.fixture(scope="session", autouse=True)
def _once() -> None:
    """Processes that are made from this one limit memory with what it has imported and built."""
    assert lowtide.limits
    native_recorder()
