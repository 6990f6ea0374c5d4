"""What is planned for one kind of step, and what its steps have shown since."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lowtide.graph import StepGraph
from lowtide.plan.background import BackgroundSearch
from lowtide.plan.data import Plan, ProgramStep
from lowtide.run.limit.key import StepKey
from lowtide.run.record.native import compiled_program
from lowtide.run.watch import StepWatch

# a step with a smaller share of the elements of the step that a plan is for gets one of its own
_WORTH_ITS_PLAN = 0.4
_MOST_SIZES = 8  # of smaller steps are remembered
_TIMED = 9  # so many steps are timed before a plan settles, and make up its step time from then on, too
_EVERY = 4  # a settled plan times every so many steps: a machine does not stay as fast as it was
_TIMED_AT_LEAST = 2  # before their times say anything


@dataclass
class Planned:
    """A plan in force.

    Attributes:
        key: of the step that was planned for.
        graph: that step, with all that exists beside it.
        plan: its plan.
        wanted: what it was made for, as `Planner.wanted` says.
        accepted_bytes: what steps may take without another plan, since none leaves the margin; or 0.
        sizes: of smaller steps that were seen, the latest last: whether one keeps the budget without a plan.
        steps: how many have run.
        timed: watches the step that is being timed, or ``None``.
        seconds: of the steps that were timed, and of recording and replaying in them where the host knows.
        programs: the plan's, as `program` gives it.
        search: goes on for a better plan, or ``None``.
    """

    key: StepKey
    graph: StepGraph
    plan: Plan
    wanted: tuple[int, int]
    accepted_bytes: int = 0
    sizes: dict[StepKey, bool] = field(default_factory=dict)
    steps: int = 0
    timed: StepWatch | None = None
    seconds: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=_TIMED))
    programs: dict[bool, tuple[Sequence[ProgramStep], Any]] = field(default_factory=dict)
    search: BackgroundSearch | None = field(default=None, repr=False)

    def better(self) -> Plan | None:
        """The plan that the search has found by now, if it adds less time and holds as much; asked for once
        that is over.
        """
        if self.search is None or not self.search.is_over:
            return None
        search, self.search = self.search, None
        found, plan = search.plan(), self.plan
        if found is None or found.predicted_extra_seconds >= plan.predicted_extra_seconds:
            return None
        return replace(found, budget_bytes=plan.budget_bytes)

    def program(self, keeps_all: bool) -> tuple[Sequence[ProgramStep], Any]:
        """The plan's program, and the same as the compiled recorder knows it.

        Args:
            keeps_all: evict nothing of the program; operations outside it still are.
        """
        if keeps_all not in self.programs:
            steps = self.plan.program
            if keeps_all:
                steps = [s._replace(replayed=False, stored=(True,) * len(s.stored)) for s in steps]
            self.programs[keeps_all] = steps, compiled_program(steps)
        return self.programs[keeps_all]

    def accept(self, margin_bytes: int, wanted: tuple[int, int]) -> None:
        """No plan leaves the margin: this one stays, and what its steps take is accepted."""
        predicted = max(self.plan.predicted_peak_bytes, self.plan.budget_bytes or 0)
        self.accepted_bytes, self.wanted = margin_bytes + predicted, wanted

    # ---- smaller steps ---------------------------------------------------------------------------

    def serves(self, key: StepKey) -> bool:
        """Whether a step with ``key`` is to run under this plan.

        A plan holds for every smaller step, since the bytes of each operation grow with the step's sizes. The
        first one that is far smaller shows whether such steps need a plan at all; if so, they get their own.
        """
        near = key.elements() >= _WORTH_ITS_PLAN * self.key.elements()
        heavy = any(known.fits_in(key) for known, fits in self.sizes.items() if not fits)
        return key.fits_in(self.key) and (self.plan.changes_nothing or near or not heavy)

    def fits_without_plan(self, key: StepKey) -> bool:
        """Whether a step with ``key`` is known to keep the budget without a plan."""
        return any(key.fits_in(known) for known, fits in self.sizes.items() if fits)

    def note_size(self, key: StepKey, fits: bool) -> None:
        """A step with ``key`` was seen to fit without a plan, or not."""
        if key == self.key:
            return
        # a size that fits covers smaller ones; a size that does not covers larger ones
        covered = [known for known in self.sizes if (known.fits_in(key) if fits else key.fits_in(known))]
        rest = [(known, was) for known, was in self.sizes.items() if known not in covered]
        self.sizes = dict([*rest, (key, fits)][-_MOST_SIZES:])

    # ---- times -----------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether enough steps were timed."""
        return len(self.seconds) == _TIMED

    def times_next(self) -> bool:
        """Whether the next step is to be timed; the first is slower than others."""
        return self.steps > 0 and self.timed is None and (not self.settled or self.steps % _EVERY == 0)

    def note_time(self) -> None:
        """Take down the time of the step that was timed, once it is known without waiting for the device."""
        watch = self.timed
        if watch is None or not watch.over():
            return
        self.timed = None
        seconds = watch.seconds()
        if seconds is not None:
            extra = watch.replay_seconds + watch.recording_seconds + self.graph.overhead_seconds
            self.seconds.append((seconds, extra if watch.device.type == "cpu" else None))

    def calibrated(self) -> Plan:
        """The plan with the times of the timed steps beside its forecast: of whole steps, and of recording
        and replaying in them.
        """
        plan = self.plan
        predicted = plan.plain_seconds + plan.predicted_extra_seconds
        if len(self.seconds) < _TIMED_AT_LEAST or not predicted:
            return plan
        whole = statistics.median(seconds for seconds, _ in self.seconds)
        replays = [again for _, again in self.seconds if again is not None]
        if replays:
            # no clock of the executor sees crowding
            extra = min(whole, statistics.median(replays) + plan.crowding_seconds)
        else:
            extra = plan.predicted_extra_seconds * whole / predicted
        return plan.calibrated(whole - extra, extra)
