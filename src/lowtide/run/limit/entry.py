"""The records of a cached plan: an `Entry`, what its steps have shown, and its plan in force (`Planned`).

They are read anywhere, and assigned in `machine.py` alone; here, asking one changes nothing. The cache owns
the entries (`cache.py`).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lowtide.graph import StepGraph
from lowtide.plan.data import Plan, ProgramStep
from lowtide.run.limit.entry_states import UNPLANNED, State
from lowtide.run.limit.key import StepKey
from lowtide.run.record.engine import program_of
from lowtide.run.transforms import sized_by_values
from lowtide.run.watch import StepWatch

_MOST_PROFILES = 4  # of one entry whose steps differ, before the budget of the longest stays
_PROFILED_STEPS = 40  # among its first so many steps
_TIMED = 9  # so many steps are timed before a plan settles, and make up its step time from then on, too
_EVERY = 4  # a settled plan times every so many steps: a machine does not stay as fast as it was
_TIMED_AT_LEAST = 2  # before their times say anything

Program = tuple[Sequence[ProgramStep], Any]
"""A plan's program, and the same as the C++ recorder knows it."""


@dataclass
class History:
    """What has come of a plan: the steps that ran under it.

    Attributes:
        steps: how many steps have run under the plan.
        timed: the step that is being timed, or ``None``.
        seconds: of each of the last steps that were timed, and of recording and replaying in it: ``None`` on
            a GPU, where the host does not know.
    """

    steps: int = 0
    timed: StepWatch | None = None
    seconds: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=_TIMED))


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan in force, and what it was made for.

    Attributes:
        key: of the step that was planned for.
        profiled: the step that was planned for, as its profile shows it (`Entry.profiled` then).
        step_graph: what `PlanMaker.transform` made of ``profiled``: the plan's ids are those of this graph.
        plan: its plan.
        forward_spans, later_keys: as of `Entry`.
        history: of the steps under it.
    """

    key: StepKey
    profiled: StepGraph
    step_graph: StepGraph
    plan: Plan
    forward_spans: Sequence[tuple[int, int]] = ()
    later_keys: Sequence[StepKey] = ()
    history: History = field(default_factory=History)

    @cached_property
    def programs(self) -> list[Program]:
        """Of each forward, its part of the plan's program."""
        of = [op.index for op in self.step_graph.operations if op.phase == "forward"]
        places = [(bisect_left(of, begin), bisect_left(of, end)) for begin, end in self.forward_spans]
        parts = [self.plan.program[begin:end] for begin, end in places]
        return [(part, program_of(part)) for part in parts]

    @cached_property
    def sized_by_values(self) -> bool:
        """Whether values decide how large results of the step are."""
        return sized_by_values(self.step_graph)

    def has_forward(self, number: int, key: StepKey) -> bool:
        """Whether the plan has a part for the ``number``-th forward of a step, with this key or larger."""
        if not 0 < number <= len(self.later_keys):  # 0 has the entry's key; a pipeline has no more keys
            return number < len(self.forward_spans) - len(self.later_keys)
        # gradients from before the step are in the first forward's key alone
        planned, key = self.later_keys[number - 1].without_gradients(), key.without_gradients()
        return key == planned or key.fits_in(planned)

    @property
    def times_next(self) -> bool:
        """Whether the next step is to be timed. The first is slower than others; once as many as make up a
        step time were timed, every `_EVERY`-th is.
        """
        history = self.history
        settled = len(history.seconds) == _TIMED
        return history.steps > 0 and history.timed is None and (not settled or history.steps % _EVERY == 0)

    def calibrated(self) -> Plan:
        """The plan with the times of the timed steps beside its forecast: of whole steps, and of recording
        and replaying in them.
        """
        plan, timed = self.plan, self.history.seconds
        predicted = plan.plain_seconds + plan.predicted_extra_seconds
        if len(timed) < _TIMED_AT_LEAST or not predicted:
            return plan
        whole = statistics.median(seconds for seconds, _ in timed)
        replays = [again for _, again in timed if again is not None]
        if replays:
            # no clock of the executor sees crowding
            extra = min(whole, statistics.median(replays) + plan.crowding_seconds)
        else:
            extra = plan.predicted_extra_seconds * whole / predicted
        return plan.calibrated(whole - extra, extra)


@dataclass
class BesidePlan:
    """Bytes that steps with one key take beside what their plan shows. A sibling begins with the same
    (`machine.borrow`).

    Attributes:
        margin_bytes: by how much a step took more than its plan predicted. The next plan leaves it free.
        hidden_bytes: what steps hold that no operation of their graph makes: the buffers of collectives that
            run beside other operations, and the random states of ``torch.utils.checkpoint``.
        unused_bytes: parameters, buffers and gradients that the profiled step does not use: resident all the
            same.
        reserve_bytes: what steps that vary leave free, since one took more.
        rise_bytes: by how much live bytes rise at most between two times that eviction on demand looks at
            them, of the profiled steps but those in ``unread``.
        unread: the profiled steps that are not part of ``rise_bytes`` yet (`machine.measure_rise`).
    """

    margin_bytes: int = 0
    hidden_bytes: int = 0
    unused_bytes: int = 0
    reserve_bytes: int = 0
    rise_bytes: int = 0
    unread: tuple[StepGraph, ...] = field(default=(), repr=False)

    @property
    def free_bytes(self) -> int:
        """What a plan leaves free of the budget."""
        return self.margin_bytes + self.hidden_bytes


@dataclass
class Traits:
    """What is true of all steps with one key. It is taken to be true of a sibling's, too (`machine.borrow`).

    Attributes:
        checkpoints: how many calls of ``torch.utils.checkpoint`` the step that is planned for made itself.
        makes_graph: a backward of that step was run with ``create_graph=True``.
        backwards: the most backwards that ran through a step that was profiled.
        differed: two steps were seen to differ in what they ran, or in sizes that values decide.
        nested: where a step that was profiled made a nested tensor whose bytes nobody counts, if it did.
    """

    checkpoints: int = 0
    makes_graph: bool = False
    backwards: int = 1
    differed: bool = False
    nested: str = ""


@dataclass
class Seen:
    """What the steps with one key have shown so far; no other entry begins with it.

    Attributes:
        profiles: how many steps were profiled.
        steps: how many steps under a plan began.
        profiled_ran: how many operations ran, without and with gradients, in the step that is planned for.
        ran: the same, in the latest step that was recorded.
        can_evict: the latest step could have evicted on demand (`PlannedStep.can_evict`).
        may_differ: steps may run other operations: so it looked (`Profiler.may_differ`), or a step ran more
            than its plan has.
        was_late: the latest step took more, and a thread that held a collective's buffer for longer may be
            the reason. If the step after it takes more, too, that is not.
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
        profiled: the longest step that was profiled, as its profile shows it, or ``None`` before. What is
            planned for has more in it (`PlanMaker.transform`).
        borrowed: whether ``profiled`` is a sibling's, before whose steps not all of the gradients exist.
        forward_spans: of each forward of that step, its first operation and the first one after it.
        later_keys: of each forward but the first, what would be its key.
        planned: the plan in force, or ``None``.
        planned_for: the version of budget and optimizer, and the margin, that the plan was made or accepted
            for.
        accepted_bytes: what steps may take without another plan, since none leaves the margin; or 0.
        refused_at: the version of budget and optimizer that no plan was found for, or ``None``.
        beside: what steps take beside their plan.
        traits: what is true of all of them.
        seen: what they have shown so far.
        outside_bytes: what its steps use that was there before, and is neither the model's nor given to it.
    """

    key: StepKey
    state: State = State.NEW
    profiled: StepGraph | None = None
    borrowed: bool = False
    forward_spans: Sequence[tuple[int, int]] = ()
    later_keys: Sequence[StepKey] = ()
    planned: Planned | None = None
    planned_for: tuple[int, int] | None = None
    accepted_bytes: int = 0
    refused_at: int | None = None
    beside: BesidePlan = field(default_factory=BesidePlan)
    traits: Traits = field(default_factory=Traits)
    seen: Seen = field(default_factory=Seen)
    outside_bytes: int = 0

    @property
    def wants_profile(self) -> bool:
        """Whether its next step is profiled."""
        return self.state in UNPLANNED

    @property
    def lends(self) -> bool:
        """Whether an entry may begin with its step graph: not of steps with many backwards, whose gradients
        add up within the step, as a pipeline's do.
        """
        of_users = len(self.forward_spans) == 1 + len(self.later_keys)
        one = not self.later_keys or self.traits.backwards == 1
        return self.profiled is not None and of_users and one

    @property
    def may_profile(self) -> bool:
        """Whether few steps were profiled so far; some models run other operations in every step."""
        return self.seen.profiles < _MOST_PROFILES and self.seen.steps < _PROFILED_STEPS

    @property
    def is_untried(self) -> bool:
        """Whether no step has run since the first was profiled."""
        fresh = self.planned is not None and self.planned.history.steps == 0
        return fresh and self.seen.profiles == 1 and self.seen.ran is None

    def is_outdated(self, version: int) -> bool:
        """Whether the plan was made for another budget or optimizer than this version of them, or for another
        margin.
        """
        margin = self.beside.margin_bytes if self.state is not State.VARYING else 0
        return self.planned is not None and self.planned_for != (version, margin)

    def serves(self, key: StepKey) -> bool:
        """Whether its plan holds for steps with this key: those that are smaller, since the bytes of each
        operation grow with the step's sizes.
        """
        return self.planned is not None and not self.wants_profile and key.fits_in(self.key)
