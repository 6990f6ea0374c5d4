"""What the steps that are timed count: every way into Python that the executor adds."""

from __future__ import annotations

import gc

import pytest
import torch

from lowtide.meter import available, counting_allocator
from lowtide.run.direct import IdleDirector
from lowtide.run.timed import TimedRecorder
from lowtide.run.watch import StepWatch, unwatched


def test_dispatches_and_hooks_are_counted() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    watch = StepWatch(lambda: None, lambda: None, torch.device("cpu"), memory=False)
    with TimedRecorder(IdleDirector(), watch=watch).recording():
        loss = (x * w).sum()
    assert watch.entries == 2 + 2, "two operations, two tensors saved by the product"
    loss.backward()
    assert watch.entries == 2 + 2 + 2, "and asked for again"
    assert 0 < watch.recording_seconds < 10 and watch.replay_seconds == 0


@pytest.mark.skipif(not available(), reason="needs the counting allocator")
@pytest.mark.parametrize("gone", [False, True])
def test_a_watch_that_ends_while_it_pauses_leaves_nothing_behind(gone: bool) -> None:
    gc.collect()  # watches of other tests that are garbage would pause with this one's
    before = counting_allocator().installs
    watches = [StepWatch(lambda: None, lambda: None, torch.device("cpu"))]
    assert counting_allocator().installs > before
    with unwatched():
        assert counting_allocator().installs == before
        if gone:
            watches.clear()
        else:
            watches[0].close()
    assert counting_allocator().installs == before
