"""Kinds of steps: which steps may share a plan, what is known of each kind, and what a step under a plan
teaches about its own when its backward ends.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lowtide import budget as budgets
from lowtide.graph import StepGraph
from lowtide.plan.data import Plan, ProgramStep
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.watch import StepWatch
from lowtide.run.record.directors import PlanDirector
from lowtide.run.record.verify import Findings

_PACE_STEPS = 9  # are timed under a plan before it settles, and make up its pace from then on, too
_PACE_EVERY = 4  # a settled plan times every so many steps: a machine does not stay as fast as it was
_PACE_STEPS_AT_LEAST = 2  # before their pace says anything
_LOOKS = 8  # at a kind whose steps differ from one to the next, before the plan for the longest stays
_LONGER = 0.1  # so much more than its graph a step has to do to be looked at
# a step with a smaller share of the elements of the step that a plan is for gets one of its own
_WORTH_ITS_PLAN = 0.4
MOST_KINDS = 24  # are remembered
_MOST_SIZES = 8  # of smaller steps are remembered with a kind


@dataclass
class Kind:
    """One kind of step, and what its steps have taught.

    Attributes:
        graph: the step as it was looked at, or ``None`` before.
        plan: the plan in force, or ``None``.
        looks: how often a step of it was looked at.
        backwards: the most that ran through a step that was looked at.
        varies: its steps may run other operations each: the forward asks for values, or a step was seen to.
        look_again: why the next step is to be looked at, or empty.
        solve_again: why the plan is to be made again before the next step, or empty.
        margin_bytes: by how much a step was seen to exceed its prediction.
        stays_bytes: what a step took under a plan that stays since no other fits, which was said; or 0.
        unseen_backward: backward runs on a thread whose operations are not seen: the next look runs one of
            its own.
        verified: fingerprint of the program whose operations were seen to reproduce, at this or another size.
        strange: its program is another than the one that was verified at another size.
        sizes: of smaller steps that were seen, the latest last: whether one keeps the budget without a plan.
        steps: how many steps have run under the plan.
        programs: the plan's, as the compiled recorder knows it; under ``True`` one that keeps all.
        timed: watches the time of the latest step.
        seconds: of the latest steps that were timed under the plan, and of recording and replaying in them
            where the host knows.
    """

    key: StepKey
    graph: StepGraph | None = None
    plan: Plan | None = None
    looks: int = 0
    backwards: int = 1
    varies: bool = False
    look_again: str = ""
    solve_again: str = ""
    margin_bytes: int = 0
    stays_bytes: int = 0
    unseen_backward: bool = False
    verified: str | None = None
    strange: bool = False
    sizes: dict[StepKey, bool] = field(default_factory=dict)
    steps: int = 0
    programs: dict[bool, Any] = field(default_factory=dict)
    timed: StepWatch | None = None
    seconds: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))

    @property
    def wants_look(self) -> bool:
        """Whether the next step is to be looked at."""
        return self.plan is None or bool(self.look_again)

    @property
    def may_look_again(self) -> bool:
        """Whether there were few looks so far: some models do something else in every step."""
        return self.looks < _LOOKS

    def ran(self, strange: int) -> None:
        """A step ran so many operations that its plan does not know."""
        if strange > 0:
            self.varies = True
        if self.plan is not None and strange > _LONGER * len(self.plan.program) and self.may_look_again:
            self.look_again = self.look_again or "a step ran other operations"

    def takes(self, graph: StepGraph, plan: Plan) -> None:
        """A plan has been made."""
        self.graph, self.plan = graph, plan
        self.look_again = self.solve_again = ""
        self.stays_bytes = 0
        self.timed = None
        self.programs = {}
        self.sizes = {}
        self.seconds.clear()

    def stands_on(self, more: int) -> None:
        """So many bytes more stand before each step than when it was looked at."""
        if self.graph is not None:
            self.graph = replace(self.graph, resident_bytes=self.graph.resident_bytes + more)

    # ---- smaller steps ---------------------------------------------------------------------------

    def serves(self, key: StepKey) -> bool:
        """Whether the plan is to be used for a step with ``key``, which fits in this kind's.

        It holds for every smaller step. Where it evicts much and the step is far smaller, the first such step
        shows whether it needs a plan at all; one that does deserves its own.
        """
        assert self.plan is not None
        near = key.elements() >= _WORTH_ITS_PLAN * self.key.elements()
        heavy = any(known.fits_in(key) for known, light in self.sizes.items() if not light)
        return self.plan.changes_nothing or near or not heavy

    def is_light(self, key: StepKey) -> bool:
        """Whether a step with ``key`` is known to keep the budget without a plan."""
        return any(key.fits_in(known) for known, light in self.sizes.items() if light)

    def notes_size(self, key: StepKey, light: bool) -> None:
        """A step with ``key`` was seen to need no plan, or to need one."""
        if key == self.key:
            return
        # what it shows of smaller steps, or of larger ones
        covered = [known for known in self.sizes if (known.fits_in(key) if light else key.fits_in(known))]
        rest = [(known, was) for known, was in self.sizes.items() if known not in covered]
        self.sizes = dict([*rest, (key, light)][-_MOST_SIZES:])

    # ---- pace ------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether enough steps were timed for a pace."""
        return len(self.seconds) == _PACE_STEPS

    def wants_pace(self) -> bool:
        """Whether the coming step is to be timed."""
        return self.timed is None and (not self.settled or self.steps % _PACE_EVERY == 0)

    def calibrated(self) -> Plan:
        """The plan with the times of the steps that were timed beside its forecast: of whole steps, and of
        recording and replaying in them.
        """
        assert self.plan is not None
        plan = self.plan
        predicted = plan.plain_seconds + plan.predicted_extra_seconds
        if len(self.seconds) < _PACE_STEPS_AT_LEAST or not predicted:
            return plan
        whole = statistics.median(seconds for seconds, _ in self.seconds)
        replays = [again for _, again in self.seconds if again is not None]
        if replays:
            # which no clock of the executor sees
            extra = min(whole, statistics.median(replays) + plan.crowding_seconds)
        else:
            extra = plan.predicted_extra_seconds * whole / predicted
        return plan.calibrated(whole - extra, extra)


def plan_for_larger(kinds: Iterable[Kind], key: StepKey) -> Kind | None:
    """The kind of the smallest planned step that is at least as large in every dimension as one with ``key``,
    else the same.

    What a step takes grows with its sizes, operation by operation, so its plan holds for the smaller step,
    too.
    """
    fitting = [k for k in kinds if k.plan is not None and not k.look_again and key.fits_in(k.key)]
    return min((k for k in fitting if k.serves(key)), key=lambda k: k.key.elements(), default=None)


def keeps_all(program: Sequence[ProgramStep]) -> tuple[ProgramStep, ...]:
    """The program with nothing evicted; a recorder still evicts what a step runs besides."""
    kept = ((step, (True,) * len(step.stored)) for step in program)
    return tuple(step._replace(replayed=False, stored=stored) for step, stored in kept)


def same_but_gradients(kinds: dict[Any, Kind], key: StepKey) -> Kind | None:
    """The planned kind that differs from ``key`` in nothing but that no gradients stood before the step."""
    return next(
        (
            k
            for k in kinds.values()
            if k.graph is not None and k.key.without_gradients() == key.without_gradients()
        ),
        None,
    )


@dataclass
class Ran:
    """A step under a plan.

    Attributes:
        key: the step's own; its plan may be for larger ones.
        plan: what it ran under.
        watch: saw what it took.
        director: saw which operations ran, or ``None`` where it ran as it is.
        findings: of its forward.
        light: it ran as it is, since steps of its size were seen to need no plan.
        taught_bytes: by how much plans are to take less, since it took more than its own said.
    """

    key: StepKey
    plan: Plan
    watch: StepWatch
    director: PlanDirector | None = None
    findings: Findings | None = None
    light: bool = False
    taught_bytes: int = 0

    @property
    def departed(self) -> int:
        """How many operations the plan did not know."""
        return self.director.departed if self.director is not None else 0

    @property
    def evicted_bytes(self) -> int:
        """The most that it would have held besides, had nothing been evicted."""
        return self.findings.evicted_bytes if self.findings is not None else 0


def learn(kind: Kind, ran: Ran, measured_bytes: int, may_be_light: bool) -> str:
    """Note with ``kind`` what a step of it took.

    Args:
        kind: the step's kind.
        ran: the step.
        measured_bytes: its peak, with what stood before it.
        may_be_light: whether smaller steps may run as they are where that keeps the budget.

    Returns:
        What to tell of it, or nothing.
    """
    plan, limit = ran.plan, ran.plan.budget_bytes
    if limit is None:
        return ""
    kept = ran.watch.backwards > kind.backwards
    if kept and ran.taught_bytes:  # it took more since its graph was kept, and only so
        kind.margin_bytes -= ran.taught_bytes
        ran.taught_bytes, kind.solve_again = 0, ""
    if measured_bytes <= limit + budgets.slack_bytes(limit):
        if not (ran.light or plan.changes_nothing):
            sure = may_be_light and ran.watch.backwards == 1 and not (ran.departed or plan.moves)
            kind.notes_size(ran.key, sure and measured_bytes + ran.evicted_bytes <= limit)
        return ""
    if measured_bytes <= kind.stays_bytes:
        return ""
    return (
        f"a planned step took {budgets.format_bytes(measured_bytes)} where "
        f"{budgets.format_bytes(plan.predicted_peak_bytes)} was predicted, {measured_bytes - limit:,} bytes "
        f"above the budget of {budgets.format_bytes(limit)}: {_remedy(kind, ran, measured_bytes, limit)}"
    )


def _remedy(kind: Kind, ran: Ran, measured_bytes: int, limit: int) -> str:
    """Note with ``kind`` what is to be done about a step that took more than its budget; in words."""
    plan = ran.plan
    if ran.light:
        kind.notes_size(ran.key, False)
        return "it ran as it is, like others of its size that fitted, and the next ones run under the plan"
    unseen = plan.changes_nothing and ran.director is None
    if (ran.departed or unseen) and kind.may_look_again:
        kind.look_again, kind.varies = "a step took more than the one that was looked at", True
        what = (
            "nothing had to be recomputed in the step that was planned for, so its operations went unseen"
            if unseen
            else "it ran other operations than the step that was planned for"
        )
        return f"{what}, and lowtide looks at the next one"
    if ran.watch.backwards > kind.backwards:
        return (
            "backward runs more than once through what one forward saved (retain_graph=True), where a plan "
            "is for one backward. Of several losses, add them up and run one backward; else give a smaller "
            "budget"
        )
    more = max(0, measured_bytes - max(plan.predicted_peak_bytes, limit - budgets.slack_bytes(limit)))
    kind.margin_bytes += more - ran.taught_bytes  # of a step with several backwards each teaches
    ran.taught_bytes = more
    kind.solve_again = "a step took more than predicted"
    return "lowtide plans again with that much less"
