"""The steps that are timed, and what a watch leaves behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.run.small_model import N, small

from lowtide import limit_memory
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


def test_a_plan_goes_on_following_the_times_of_its_steps() -> None:
    model, x = small(), torch.randn(100, N)
    handle = limit_memory(model, budget="90%")
    planned, timed = None, []
    for _ in range(60):
        model(x).backward()
        planned = handle._limiter.cache.latest
        assert planned is not None
        timed.append(planned.timed is not None)
    assert planned is not None and planned.is_settled
    begin = timed.index(True)
    assert all(timed[begin : begin + 9])
    assert [at for at in range(20, 60) if timed[at]] == list(range(20 + timed[20:].index(True), 60, 4)), (
        "every fourth"
    )
    planned.seconds.extend([(2.0, 0.5)] * 4)
    assert (
        handle.plan is not None
        and handle.plan.calibrated_plain_seconds is not None
        and handle.plan.calibrated_plain_seconds < 1
    )
    forecast = handle.plan.plain_seconds, handle.plan.predicted_extra_seconds
    planned.seconds.extend([(2.0, 0.5)])
    slow = handle.plan
    assert (slow.calibrated_plain_seconds, slow.calibrated_extra_seconds) == (1.5, 0.5), (
        "most of the latest steps took so long"
    )
    assert (slow.plain_seconds, slow.predicted_extra_seconds) == forecast, "what was forecast stays"
    for _ in range(20):
        model(x).backward()
    assert handle.plan.calibrated_plain_seconds is not None and handle.plan.calibrated_plain_seconds < 1, (
        "and then no longer"
    )


def test_a_time_that_the_device_has_yet_to_tell_is_not_waited_for() -> None:
    model, x = small(), torch.randn(100, N)
    handle = limit_memory(model, budget="90%")
    for _ in range(6):
        model(x).backward()
    planned = handle._limiter.cache.latest
    assert planned is not None and planned.timed is not None
    running, before = planned.timed, len(planned.seconds)

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    end, running._marks[-1] = running._marks[-1], Event()
    model(x).backward()
    assert planned.timed is running and len(planned.seconds) == before, "no other step is timed meanwhile"
    running._marks[-1] = end
    model(x).backward()
    assert planned.timed is not running and len(planned.seconds) == before + 1
