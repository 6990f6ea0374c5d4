"""What a watch over a step leaves behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from lowtide.meter import available, counting_allocator
from lowtide.run.watch import StepWatch


@pytest.mark.skipif(not available(), reason="needs the counting allocator")
@pytest.mark.parametrize("gone", [False, True])
def test_a_watch_that_ends_leaves_nothing_behind(gone: bool) -> None:
    with ThreadPoolExecutor(1) as own:  # watches of other tests, which something may hold, are not this one's
        own.submit(ends, gone).result()


def ends(gone: bool) -> None:
    before = counting_allocator().installs
    watches = [StepWatch(lambda watch: None, torch.device("cpu"))]
    assert counting_allocator().installs > before
    if gone:
        watches.clear()
    else:
        watches[0].close()
    assert counting_allocator().installs == before


def test_replays_of_each_forward_of_a_step_count() -> None:
    watch = StepWatch(lambda watch: None, torch.device("cpu"))
    for seconds in (1.0, 2.0):
        watch.follow(SimpleNamespace(seconds=seconds))
    assert watch.replay_seconds == 3
    watch.close()
