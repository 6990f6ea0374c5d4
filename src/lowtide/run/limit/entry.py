"""The records of the steps with one key: an `Entry`, what is true of its steps, and its plan in force.

The book owns the entries, and assigns them (`book.py`).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any

from lowtide.graph import StepGraph
from lowtide.plan.data import Plan, ProgramStep
from lowtide.run.limit.key import StepKey
from lowtide.run.record.engine import program_of
from lowtide.run.watch import StepWatch

_TIMED = 9  # so many steps are timed before a plan settles, and make up its step time from then on, too
_EVERY = 4  # a settled plan times every so many steps: a machine does not stay as fast as it was
_TIMED_AT_LEAST = 2  # before their times say anything

Program = tuple[Sequence[ProgramStep], Any]
"""A plan's program, and the same as C++ follows it."""


class State(Enum):
    """The state of an entry: what holds the budget in its next step."""

    NEW = "the governor alone: there is no plan yet"
    PLANNED = "the plan, and the governor where the step departs from it"
    REFUSED = "the governor, which a step with these sizes leaves too little: no plan fits the budget"


class How(Enum):
    """How the next step of an entry runs."""

    LISTEN = auto()
    """The step is written down while the governor holds its budget."""
    ASIDE = auto()
    """A step of lowtide's own is written down before it, with the same arguments."""
    FOLLOW = auto()
    """The step follows the plan."""
    GOVERN = auto()
    """The governor alone holds the budget, and nothing is written down."""
    PASS = auto()
    """The step runs as it is: it fits by a tenth of the budget and more."""


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

    @property
    def times_next(self) -> bool:
        """Whether the next step is to be timed. The first is slower than others; once as many as make up a
        step time were timed, every `_EVERY`-th is.
        """
        settled = len(self.seconds) == _TIMED
        return self.steps > 0 and self.timed is None and (not settled or self.steps % _EVERY == 0)

    def read_clock(self, overhead_seconds: float) -> None:
        """Take down the time of the step that was timed, once it is known without waiting for the device."""
        watch = self.timed
        if watch is None or not watch.over():
            return
        self.timed = None
        if (seconds := watch.seconds()) is not None:
            extra = watch.replay_seconds + watch.recording_seconds + overhead_seconds
            self.seconds.append((seconds, extra if watch.device.type == "cpu" else None))


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan in force, and what it was made for.

    Attributes:
        key: of the step that was planned for.
        step_graph: what `PlanMaker.transform` made of the step that was written down: the plan's ids are
            those of this graph.
        plan: its plan.
        forward_spans, later_keys: as of `Entry`.
        history: of the steps under it.
        is_kept: an earlier process made it. Its first step here shows whether the model's code is the same.
    """

    key: StepKey
    step_graph: StepGraph
    plan: Plan
    forward_spans: Sequence[tuple[int, int]] = ()
    later_keys: Sequence[StepKey] = ()
    history: History = field(default_factory=History)
    is_kept: bool = False

    @cached_property
    def programs(self) -> list[Program]:
        """Of each forward, its part of the plan's program."""
        of = [op.index for op in self.step_graph.operations if op.phase == "forward"]
        places = [(bisect_left(of, begin), bisect_left(of, end)) for begin, end in self.forward_spans]
        parts = [self.plan.program[begin:end] for begin, end in places]
        return [(part, program_of(part)) for part in parts]

    def has_forward(self, number: int, key: StepKey) -> bool:
        """Whether the plan has a part for the ``number``-th forward of a step, with this key or larger."""
        if not 0 < number <= len(self.later_keys):  # 0 has the entry's key; a pipeline has no more keys
            return number < len(self.forward_spans) - len(self.later_keys)
        # gradients from before the step are in the first forward's key alone
        planned, key = self.later_keys[number - 1].without_gradients(), key.without_gradients()
        return key == planned or key.fits_in(planned)

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
class Facts:
    """What is true of the steps with one key, as the one that was written down shows it. It is taken to be
    true of a sibling's, too.

    Attributes:
        backwards: the most backwards that ran through a step.
        checkpoints: how many calls of ``torch.utils.checkpoint`` the step made itself.
        makes_graph: a backward of the step was run with ``create_graph=True``.
        nested: where the step made a nested tensor whose bytes nobody counts, if it did.
        hidden_bytes: what steps hold that no operation of their graph makes: the buffers of collectives that
            run beside other operations, and the random states of ``torch.utils.checkpoint``.
        unused_bytes: parameters, buffers and gradients that the step does not use: resident all the same.
        outside_bytes: what the step uses that was there before, and is neither the model's nor given to it.
        backward_unseen: backward runs on a thread whose operations are not intercepted.
        may_differ: the steps may run other operations each time: the forward asks for values, draws random
            numbers in Python, or is given numbers and objects, which are in no key.
    """

    backwards: int = 1
    checkpoints: int = 0
    makes_graph: bool = False
    nested: str = ""
    hidden_bytes: int = 0
    unused_bytes: int = 0
    outside_bytes: int = 0
    backward_unseen: bool = False
    may_differ: bool = False


@dataclass
class Kind:
    """Steps whose keys differ in sizes alone.

    Attributes:
        governed: how many of them no plan foresaw: they were larger, or ran other operations.
        plans: how many plans were made of them.
        listens: the next of them is written down, whether a plan foresees it or not. One that has a plan is
            not written down aside (`How.ASIDE`).
        recorded: they are recorded though they fit as they are: one took more than the budget, or would, or a
            backward of one made a graph, of which no plan evicts anything.
    """

    governed: int = 0
    plans: int = 0
    listens: bool = True
    recorded: bool = False


@dataclass
class Entry:
    """The plan of the steps with one key, and what they have shown.

    Attributes:
        key: the cache key.
        state: what holds the budget in its next step.
        graph: the step that was written down last, or ``None`` before. What is planned for has more in it
            (`PlanMaker.transform`).
        borrowed: whether ``graph`` is a sibling's, before whose steps not all of the gradients exist.
        forward_spans: of each forward of that step, its first operation and the first one after it.
        later_keys: of each forward but the first, what would be its key.
        planned: the plan in force, or ``None``.
        planned_for: the version of budget and optimizer that the plan was made for, or refused at.
        facts: what is true of its steps.
        listened: how many of its steps were written down.
        is_held: no plan fits, and the governor has held its steps; or with less than any plan would.
        kind: of its steps.
        is_asked: another rank that shares the plan writes its next step down.
    """

    key: StepKey
    kind: Kind
    state: State = State.NEW
    graph: StepGraph | None = None
    borrowed: bool = False
    forward_spans: Sequence[tuple[int, int]] = ()
    later_keys: Sequence[StepKey] = ()
    planned: Planned | None = None
    planned_for: int | None = None
    facts: Facts = field(default_factory=Facts)
    listened: int = 0
    is_held: bool = False
    is_asked: bool = False

    @property
    def is_listened(self) -> bool:
        """Whether its next step is written down."""
        known = self.kind.plans > 0 if self.state is State.NEW else self.is_held
        return self.is_asked or self.kind.listens or not (known or self.state is State.PLANNED)

    @property
    def lends(self) -> bool:
        """Whether an entry may begin with its step graph: not of steps with many backwards, whose gradients
        add up within the step, as a pipeline's do.
        """
        of_users = len(self.forward_spans) == 1 + len(self.later_keys)
        one = not self.later_keys or self.facts.backwards == 1
        return self.graph is not None and of_users and one

    def serves(self, key: StepKey) -> bool:
        """Whether its plan holds for steps with this key: those that are smaller, since the bytes of each
        operation grow with the step's sizes.
        """
        return self.planned is not None and key.fits_in(self.key)
