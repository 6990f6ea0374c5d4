"""A cached plan: an entry, with what its steps have shown.

The state machine alone changes an `Entry` (`machine.py`), and the cache owns it (`cache.py`). What ran under
a plan in force, and how long that took, is the plan's own (`Planned`).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from lowtide.graph import StepGraph
from lowtide.plan.background import BackgroundSearch
from lowtide.plan.data import Plan, ProgramStep
from lowtide.run.hidden_costs import rates
from lowtide.run.limit.key import StepKey
from lowtide.run.record.cpp_recorder import AnyProgram, cpp_program
from lowtide.run.watch import StepWatch

_MOST_PROFILES = 4  # of one entry whose steps differ, before the budget of the longest stays
_PROFILED_STEPS = 40  # among its first so many steps
_TIMED = 9  # so many steps are timed before a plan settles, and make up its step time from then on, too
_EVERY = 4  # a settled plan times every so many steps: a machine does not stay as fast as it was
_TIMED_AT_LEAST = 2  # before their times say anything


class State(Enum):
    """The state of an entry; the value says what its next step does."""

    NEW = "is profiled, unless a plan can be made from the graph of a sibling"
    REFUSED = "is profiled again, or planned for where another budget was given"
    DOUBTED = "is profiled, since other operations ran than the plan in force has"
    STALE = "waits for a plan"
    PLANNED = "runs under the plan"
    VARYING = "evicts when memory is short, since its steps run other operations each time"
    GONE = "runs under the plan that it began with; nothing follows"


@dataclass
class Planned:
    """A plan in force, and the times of the steps that ran under it.

    Attributes:
        key: of the step that was planned for.
        profiled: the step graph that was planned for, the optimizer aside.
        graph: the same with all that exists beside it.
        plan: its plan.
        search: goes on for a better plan, or ``None``.
        awaits_better: a search goes on at the first of the ranks that share the plan.
        steps: how many steps have run under the plan.
        timed: the step that is being timed, or ``None``.
        seconds: of the steps that were timed, and of recording and replaying in them where the host knows.
    """

    key: StepKey
    profiled: StepGraph
    graph: StepGraph
    plan: Plan
    search: BackgroundSearch | None = field(default=None, repr=False)
    awaits_better: bool = False
    steps: int = 0
    timed: StepWatch | None = None
    seconds: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=_TIMED))
    _program: tuple[Sequence[ProgramStep], Any] | None = None
    _programs: list[tuple[Sequence[ProgramStep], Any]] | None = None
    _for_varying: tuple[dict[int | None, float], AnyProgram] | None = None

    def better(self) -> Planned | None:
        """A better plan than this one, once the search is over and if it has found one; it is handed out
        once. A search for less time has found one that adds less within the same budget; a search for less
        memory one with a smaller peak, and the budget falls by the difference.
        """
        if self.search is None or not self.search.is_over:
            return None
        search, self.search = self.search, None
        found, plan = search.plan(), self.plan
        if found is None:
            return None
        saved = max(0, plan.predicted_peak_bytes - found.predicted_peak_bytes) if search.lowers else 0
        if not saved and found.predicted_extra_seconds >= plan.predicted_extra_seconds:
            return None
        budget = None if plan.budget_bytes is None else plan.budget_bytes - saved
        better = replace(found, budget_bytes=budget)
        return Planned(self.key, self.profiled, self.graph, better)

    def stop(self) -> None:
        """End the search."""
        if self.search is not None:
            self.search.stop()
            self.search = None

    def program(self) -> tuple[Sequence[ProgramStep], Any]:
        """The plan's program, and the same as the C++ recorder knows it."""
        if self._program is None:
            self._program = self.plan.program, cpp_program(self.plan.program)
        return self._program

    def programs(self, spans: Sequence[tuple[int, int]]) -> list[tuple[Sequence[ProgramStep], Any]]:
        """The same of each forward of a step that has several: its part of the plan's program.

        Args:
            spans: of each forward, its first operation and the first one after it.
        """
        if self._programs is None:
            of = [op.index for op in self.graph.operations if op.phase == "forward"]
            places = [(bisect_left(of, begin), bisect_left(of, end)) for begin, end in spans]
            parts = [self.plan.program[begin:end] for begin, end in places]
            self._programs = [(part, cpp_program(part)) for part in parts]
        return self._programs

    def for_varying(self) -> tuple[dict[int | None, float], AnyProgram]:
        """What steps need that run other operations than the plan has: the rates of operations, and what the
        C++ recorder knows of them.
        """
        if self._for_varying is None:
            self._for_varying = rates(self.graph), AnyProgram()
        return self._for_varying

    # ---- times -----------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether enough steps were timed."""
        return len(self.seconds) == _TIMED

    def times_next(self) -> bool:
        """Whether the next step is to be timed; the first is slower than others."""
        return self.steps > 0 and self.timed is None and (not self.is_settled or self.steps % _EVERY == 0)

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


@dataclass
class Room:
    """What steps with one key take beside what their plan shows. It is a sibling's, too (`machine.borrow`).

    Attributes:
        margin_bytes: by how much a step was seen to exceed its prediction.
        unseen_bytes: what steps hold that their graph does not show (collectives, random states).
        reserve_bytes: what varying steps leave free, since they took more.
        rise_bytes: the most that live bytes rose between two looks, in the profiled steps so far but these:
        profiled: steps that nobody has gone through for it yet (`machine.find_rise`).
    """

    margin_bytes: int = 0
    unseen_bytes: int = 0
    reserve_bytes: int = 0
    rise_bytes: int = 0
    profiled: tuple[StepGraph, ...] = field(default=(), repr=False)

    @property
    def free_bytes(self) -> int:
        """What a plan leaves free of the budget."""
        return self.margin_bytes + self.unseen_bytes


@dataclass
class Traits:
    """What kind of steps those with one key are. It is true of a sibling's, too (`machine.borrow`).

    Attributes:
        checkpoints: how many calls of ``torch.utils.checkpoint`` the step that is planned for made itself.
        makes_graph: a backward of that step was run with ``create_graph=True``.
        backwards: the most backwards that ran through a step that was profiled.
        differed: two steps were seen to differ in what they ran.
    """

    checkpoints: int = 0
    makes_graph: bool = False
    backwards: int = 1
    differed: bool = False


@dataclass
class Seen:
    """What the steps with one key have shown; no other entry begins with it.

    Attributes:
        profiles: how many steps were profiled.
        steps: how many steps began under a plan.
        profiled_ran: how many operations ran, without and with gradients, in the step that is planned for.
        ran: the same, in the latest step that was recorded.
        can_evict: the latest step could have evicted on demand (`PlannedStep.can_evict`).
        may_differ: steps may run other operations: the forward reads values, or a step ran more than its
            plan has.
        was_late: what the latest step took more may have been a collective's buffer that a thread held for
            longer. Another in turn is believed.
        backward_unseen: backward runs on a thread whose operations are not intercepted, so that a step is
            profiled aside.
        unwarned_bytes: the most that profiled steps took, which no warning has compared with a budget yet.
    """

    profiles: int = 0
    steps: int = 0
    profiled_ran: tuple[int, int] | None = None
    ran: tuple[int, int] | None = None
    can_evict: bool = False
    may_differ: bool = False
    was_late: bool = False
    backward_unseen: bool = False
    unwarned_bytes: int = 0


@dataclass
class Entry:
    """The cached plan of the steps with one key, and what they have shown.

    Attributes:
        key: the cache key.
        state: what its next step does.
        graph: the longest step that was profiled, the optimizer aside, or ``None`` before.
        forward_spans: of each forward of a pipeline's step, its first operation and the first one after it.
        planned: the plan in force, or ``None``.
        planned_for: the version of budget and optimizer, and the margin, that the plan was made or accepted
            for.
        accepted_bytes: what steps may take without another plan, since none leaves the margin; or 0.
        refused_at: the version of budget and optimizer that no plan was found for, or ``None``.
        room: what steps take beside their plan.
        traits: what kind of steps they are.
        seen: what they have shown.
    """

    key: StepKey
    state: State = State.NEW
    graph: StepGraph | None = None
    forward_spans: Sequence[tuple[int, int]] = ()
    planned: Planned | None = None
    planned_for: tuple[int, int] | None = None
    accepted_bytes: int = 0
    refused_at: int | None = None
    room: Room = field(default_factory=Room)
    traits: Traits = field(default_factory=Traits)
    seen: Seen = field(default_factory=Seen)

    @property
    def wants_profile(self) -> bool:
        """Whether its next step is profiled."""
        return self.state in (State.NEW, State.REFUSED, State.DOUBTED)

    @property
    def may_profile(self) -> bool:
        """Whether few steps were profiled so far; some models run other operations in every step."""
        return self.seen.profiles < _MOST_PROFILES and self.seen.steps < _PROFILED_STEPS

    @property
    def is_untried(self) -> bool:
        """Whether no step has run since the first was profiled; not of a pipeline."""
        planned = self.planned
        fresh = planned is not None and planned.steps == 0
        return fresh and self.seen.profiles == 1 and self.seen.ran is None and not self.forward_spans

    def serves(self, key: StepKey) -> bool:
        """Whether its plan holds for steps with this key: those that are smaller, since the bytes of each
        operation grow with the step's sizes.
        """
        return self.planned is not None and not self.wants_profile and key.fits_in(self.key)
