"""Kinds of steps: which steps may share a plan, and what is known of each kind."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lowtide.graph import StepGraph
from lowtide.plan.data import Plan, ProgramStep
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.watch import StepWatch

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
        backwards: how many backwards ran through the step that was looked at.
        varies: its steps may run other operations each: the forward asks for values, or a step was seen to.
        look_again: why the next step is to be looked at, or empty.
        solve_again: why the plan is to be made again before the next step, or empty.
        margin_bytes: by how much a step was seen to exceed its prediction.
        stays_bytes: what a step took under a plan that stays since no other fits, which was said; or 0.
        unseen_backward: backward runs on a thread whose operations are not seen: the next look runs one of
            its own.
        claims: gathers whose results layers save, in the next look.
        without_claims: the graph and plan of a step without claims, to compare with.
        verified: digest of the program whose operations were seen to reproduce, at this or another size.
        strange: its program is another than the one that was verified at another size.
        light: sizes of smaller steps that were seen to need no plan.
        heavy: sizes of far smaller steps that were seen to need one, and deserve their own.
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
    claims: frozenset[int] = frozenset()
    without_claims: tuple[StepGraph, Plan] | None = None
    verified: str = ""
    strange: bool = False
    light: list[StepKey] = field(default_factory=list)
    heavy: list[StepKey] = field(default_factory=list)
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
        self.light, self.heavy = [], []
        self.seconds.clear()

    def stands_on(self, more: int) -> None:
        """So many bytes more stand before each step than when it was looked at."""
        if self.graph is not None:
            self.graph = replace(self.graph, resident_bytes=self.graph.resident_bytes + more)
        if self.without_claims is not None:
            graph, plan = self.without_claims
            self.without_claims = replace(graph, resident_bytes=graph.resident_bytes + more), plan

    # ---- smaller steps ---------------------------------------------------------------------------

    def serves(self, key: StepKey) -> bool:
        """Whether the plan is to be used for a step with ``key``, which fits in this kind's.

        It holds for every smaller step. Where it evicts much and the step is far smaller, the first such step
        shows whether it needs a plan at all; one that does deserves its own.
        """
        assert self.plan is not None
        near = key.elements() >= _WORTH_ITS_PLAN * self.key.elements()
        return self.plan.changes_nothing or near or not any(known.fits_in(key) for known in self.heavy)

    def is_light(self, key: StepKey) -> bool:
        """Whether a step with ``key`` is known to keep the budget without a plan."""
        return any(key.fits_in(known) for known in self.light)

    def notes_size(self, key: StepKey, light: bool) -> None:
        """A step with ``key`` was seen to need no plan, or to need one."""
        if key == self.key:
            return
        if light:
            smaller = [known for known in self.light if not known.fits_in(key)]
            self.light = [key, *smaller][:_MOST_SIZES]
        else:
            self.light = [known for known in self.light if not key.fits_in(known)]
            self.heavy = [key, *(known for known in self.heavy if not key.fits_in(known))][:_MOST_SIZES]

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
    """The program with nothing given up; a recorder still gives up what a step runs besides."""
    kept = ((step, (True,) * len(step.stored)) for step in program)
    return tuple(step._replace(replayed=False, stored=stored, claimed=False) for step, stored in kept)


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
