"""Which steps under a plan are timed, and what their times say of the plan's forecast."""

from __future__ import annotations

import statistics
from collections import deque

from lowtide.plan.data import Plan
from lowtide.run.watch import StepWatch

_STEPS = 9  # are timed before a plan settles, and make up its step time from then on, too
_EVERY = 4  # a settled plan times every so many steps: a machine does not stay as fast as it was
_STEPS_AT_LEAST = 2  # before their times say anything


class StepTimes:
    """The times of the latest steps under a plan.

    Attributes:
        timed: watches the step that is being timed, or ``None``.
        seconds: of the steps that were timed, and of recording and replaying in them where the host knows.
    """

    def __init__(self) -> None:
        self.timed: StepWatch | None = None
        self.seconds: deque[tuple[float, float | None]] = deque(maxlen=_STEPS)

    @property
    def settled(self) -> bool:
        """Whether enough steps were timed."""
        return len(self.seconds) == _STEPS

    def due(self, number: int) -> bool:
        """Whether a step is to be timed, the ``number``-th; the first is slower than others."""
        return number > 0 and self.timed is None and (not self.settled or number % _EVERY == 0)

    def note(self, overhead_seconds: float) -> None:
        """Take down the time of the step that was timed, once it is known without waiting for the device.

        Args:
            overhead_seconds: what the executor adds to a step beside recording and replaying.
        """
        watch = self.timed
        if watch is None or not watch.over():
            return
        self.timed = None
        seconds = watch.seconds()
        if seconds is not None:
            extra = watch.replay_seconds + watch.recording_seconds + overhead_seconds
            self.seconds.append((seconds, extra if watch.device.type == "cpu" else None))

    def calibrated(self, plan: Plan) -> Plan:
        """The plan with the times of the timed steps beside its forecast: of whole steps, and of recording
        and replaying in them.
        """
        predicted = plan.plain_seconds + plan.predicted_extra_seconds
        if len(self.seconds) < _STEPS_AT_LEAST or not predicted:
            return plan
        whole = statistics.median(seconds for seconds, _ in self.seconds)
        replays = [again for _, again in self.seconds if again is not None]
        if replays:
            # no clock of the executor sees crowding
            extra = min(whole, statistics.median(replays) + plan.crowding_seconds)
        else:
            extra = plan.predicted_extra_seconds * whole / predicted
        return plan.calibrated(whole - extra, extra)
