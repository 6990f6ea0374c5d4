"""What the steps that are timed count: every way into Python that the executor adds."""

from __future__ import annotations

import os

import pytest
import torch

from lowtide.plan import ways
from lowtide.run.direct import IdleDirector
from lowtide.run.timed import TimedRecorder
from lowtide.run.watch import StepWatch


def test_dispatches_and_hooks_are_counted() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    watch = StepWatch(lambda: None, lambda: None, torch.device("cpu"), memory=False)
    with TimedRecorder(IdleDirector(), watch=watch).recording():
        loss = (x * w).sum()
    assert watch.entries == 2 + 2, "two operations, two tensors saved by the product"
    loss.backward()
    assert watch.entries == 2 + 2 + 2, "and asked for again"
    assert 0 < watch.recording_seconds < 10 and watch.replay_seconds == 0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores of a process are not known here")
def test_a_tier_takes_time_from_a_step_only_where_no_core_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert ways._crowding() == 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert ways._crowding() == 0.5
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert ways._crowding() == 1
