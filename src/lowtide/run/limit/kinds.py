"""Kinds of steps: which steps may share a plan, and what is known of each kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from lowtide.graph import StepGraph
from lowtide.plan.data import Plan, ProgramStep
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.step_times import StepTimes

_LOOKS = 8  # at a kind whose steps differ from one to the next, before the plan for the longest stays
_LONGER = 0.1  # a step with a larger share of operations that its plan lacks is looked at
# a step with a smaller share of the elements of the step that a plan is for gets one of its own
_WORTH_ITS_PLAN = 0.4
MOST_KINDS = 24  # are remembered
_MOST_SIZES = 8  # of smaller steps are remembered with a kind


class Replan(Enum):
    """Why a plan is to be made again before the next step."""

    TOOK_MORE = auto()
    """A step took more than predicted."""
    BUDGET_CHANGED = auto()
    """The budget or the optimizer is another."""


@dataclass
class Kind:
    """One kind of step: its plan, and what its steps have shown.

    Attributes:
        graph: the step as it was looked at, or ``None`` before.
        plan: the plan in force, or ``None``.
        looks: how often a step of it was looked at.
        backwards: the most that ran through a step that was looked at.
        varies: its steps may differ in their operations: the forward reads values, or a step was seen to.
        look_again: whether the next step is to be looked at although there is a plan.
        replan: why the plan is to be made again before the next step, or ``None``.
        margin_bytes: by how much a step was seen to exceed its prediction.
        accepted_bytes: what steps may take without another warning, since no plan leaves the margin; or 0.
        unseen_backward: backward runs on a thread whose operations are not intercepted: the next look runs
            its own backward.
        verified: fingerprint of the program whose operations were seen to reproduce, at this or another size.
        must_verify: its program is another than the one that was verified at another size.
        sizes: of smaller steps that were seen, the latest last: whether one keeps the budget without a plan.
        steps: how many steps have run under a plan.
        programs: the plan's, as the compiled recorder knows it; under ``True`` one that keeps all.
        times: of the latest steps under the plan.
    """

    key: StepKey
    graph: StepGraph | None = None
    plan: Plan | None = None
    looks: int = 0
    backwards: int = 1
    varies: bool = False
    look_again: bool = False
    replan: Replan | None = None
    margin_bytes: int = 0
    accepted_bytes: int = 0
    unseen_backward: bool = False
    verified: str | None = None
    must_verify: bool = False
    sizes: dict[StepKey, bool] = field(default_factory=dict)
    steps: int = 0
    programs: dict[bool, Any] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def wants_look(self) -> bool:
        """Whether the next step is to be looked at."""
        return self.plan is None or self.look_again

    @property
    def may_look_again(self) -> bool:
        """Whether there were few looks so far; some models run other operations in every step."""
        return self.looks < _LOOKS

    def note_unplanned_operations(self, count: int) -> None:
        """A step ran so many operations that its plan does not have."""
        if count > 0:
            self.varies = True
        if self.plan is not None and count > _LONGER * len(self.plan.program) and self.may_look_again:
            self.look_again = True

    def take(self, graph: StepGraph, plan: Plan) -> None:
        """A plan has been made."""
        self.graph, self.plan = graph, plan
        self.look_again, self.replan = False, None
        self.accepted_bytes = 0
        self.programs = {}
        self.sizes = {}
        self.times = StepTimes()

    def keep_plan(self) -> None:
        """No plan leaves the margin: keep the present one, and accept what its steps take."""
        assert self.plan is not None
        predicted = max(self.plan.predicted_peak_bytes, self.plan.budget_bytes or 0)
        self.accepted_bytes = self.margin_bytes + predicted
        self.margin_bytes, self.replan = 0, None

    def calibrated(self) -> Plan:
        """The plan with the times of its steps beside its forecast."""
        assert self.plan is not None
        return self.times.calibrated(self.plan)

    def add_resident(self, more: int) -> None:
        """Add to the bytes that exist before each step."""
        if self.graph is not None:
            self.graph = replace(self.graph, resident_bytes=self.graph.resident_bytes + more)

    # ---- smaller steps ---------------------------------------------------------------------------

    def serves(self, key: StepKey) -> bool:
        """Whether a step with ``key``, which fits in this kind's, is to run under this plan.

        The plan holds for every smaller step. The first one that is far smaller shows whether such steps need
        a plan at all; if so, they get their own.
        """
        assert self.plan is not None
        near = key.elements() >= _WORTH_ITS_PLAN * self.key.elements()
        heavy = any(known.fits_in(key) for known, fits in self.sizes.items() if not fits)
        return self.plan.changes_nothing or near or not heavy

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


def plan_for_larger(kinds: Iterable[Kind], key: StepKey) -> Kind | None:
    """The smallest planned kind that is at least as large as ``key`` in every dimension, and otherwise equal.

    The bytes of each operation grow with the step's sizes, so a plan holds for smaller steps, too.
    """
    fitting = [k for k in kinds if k.plan is not None and not k.look_again and key.fits_in(k.key)]
    return min((k for k in fitting if k.serves(key)), key=lambda k: k.key.elements(), default=None)


def keeps_all(program: Sequence[ProgramStep]) -> tuple[ProgramStep, ...]:
    """The program with nothing evicted; operations outside it still are."""
    kept = ((step, (True,) * len(step.stored)) for step in program)
    return tuple(step._replace(replayed=False, stored=stored) for step, stored in kept)


def same_but_gradients(kinds: dict[Any, Kind], key: StepKey) -> Kind | None:
    """The planned kind whose key is equal but for the gradients that exist before the step."""
    wanted = key.without_gradients()
    found = (k for k in kinds.values() if k.graph is not None and k.key.without_gradients() == wanted)
    return next(found, None)
