"""No test of the meter leaves the counting allocator installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide.meter import available, counting_allocator


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = counting_allocator().installs if available() else 0
    yield
    assert not available() or counting_allocator().installs == before
