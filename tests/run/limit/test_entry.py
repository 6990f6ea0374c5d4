"""The times of the steps that ran under a plan."""

from __future__ import annotations

import torch
from small_model import N, small

from lowtide import limit_memory


def test_a_plan_goes_on_following_the_times_of_its_steps() -> None:
    model, x = small(), torch.randn(100, N)
    handle = limit_memory(model, budget="90%")
    planned, timed = None, []
    for _ in range(60):
        model(x).backward()
        planned = handle._limiter.book.latest
        assert planned is not None
        timed.append(planned.history.timed is not None)
    assert planned is not None and len(planned.history.seconds) == 9
    begin = timed.index(True)
    assert all(timed[begin : begin + 9])
    assert [at for at in range(20, 60) if timed[at]] == list(range(20 + timed[20:].index(True), 60, 4)), (
        "every fourth"
    )
    planned.history.seconds.extend([(2.0, 0.5)] * 4)
    assert (
        handle.plan is not None
        and handle.plan.calibrated_plain_seconds is not None
        and handle.plan.calibrated_plain_seconds < 1
    )
    forecast = handle.plan.plain_seconds, handle.plan.predicted_extra_seconds
    planned.history.seconds.extend([(2.0, 0.5)])
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
    planned = handle._limiter.book.latest
    assert planned is not None and planned.history.timed is not None
    running, before = planned.history.timed, len(planned.history.seconds)

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    end, running._marks[-1] = running._marks[-1], Event()
    model(x).backward()
    assert planned.history.timed is running and len(planned.history.seconds) == before, (
        "no other step is timed meanwhile"
    )
    running._marks[-1] = end
    model(x).backward()
    assert planned.history.timed is not running and len(planned.history.seconds) == before + 1
