"""What a step under a plan showed, and what follows from it before the next step.

`after` decides, and changes nothing; `learn` carries the decision out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from lowtide import budget as budgets
from lowtide.plan.data import Plan
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.kinds import Kind, Replan
from lowtide.run.record.directors import PlanDirector
from lowtide.run.record.verify import Findings
from lowtide.run.watch import StepWatch


class After(Enum):
    """What follows a step."""

    NOTHING = auto()
    NOTE_FITS = auto()
    """Steps of its size need no plan."""
    NOTE_NEEDS_PLAN = auto()
    """Steps of its size need a plan."""
    RUN_UNDER_PLAN = auto()
    """It ran without its plan and should not have."""
    LOOK_AT_UNSEEN = auto()
    """It ran without a recorder; look at the next one."""
    LOOK_AT_OTHERS = auto()
    """It ran other operations than its plan has; look at the next one."""
    ONLY_TELL = auto()
    """It had more backwards than a plan is for; no plan would help."""
    PLAN_WITH_LESS = auto()
    """It took more than predicted; plan again with that much less."""


_TOLD = {
    After.RUN_UNDER_PLAN: (
        "it ran as it is, like others of its size that fitted, and the next ones run under the plan"
    ),
    After.LOOK_AT_UNSEEN: (
        "nothing had to be recomputed in the step that was planned for, so its operations went unseen, and "
        "lowtide looks at the next one"
    ),
    After.LOOK_AT_OTHERS: (
        "it ran other operations than the step that was planned for, and lowtide looks at the next one"
    ),
    After.ONLY_TELL: (
        "backward runs more than once through what one forward saved (retain_graph=True), where a plan is "
        "for one backward. Of several losses, add them up and run one backward; else give a smaller budget"
    ),
    After.PLAN_WITH_LESS: "lowtide plans again with that much less",
}


@dataclass
class Ran:
    """A step under a plan.

    Attributes:
        key: the step's own; its plan may be for larger ones.
        plan: what it ran under.
        without_plan: it ran as it is, since steps of its size were seen to need no plan.
        watch: measures what it takes.
        director: followed its operations, or ``None`` where it was not recorded.
        findings: of its forward.
        margin_bytes: what it added to its kind's margin.
    """

    key: StepKey
    plan: Plan
    without_plan: bool = False
    watch: StepWatch = field(init=False)
    director: PlanDirector | None = None
    findings: Findings = field(default_factory=Findings)
    margin_bytes: int = 0


class Outcome(NamedTuple):
    """What a step showed when a backward through it ended.

    Attributes:
        measured_bytes: its peak, resident bytes included.
        evicted_bytes: the most that it would have taken on top without evictions.
        backwards: how many ran so far.
        followed: it ran the operations of its plan and no others, as far as is known.
        recorded: its operations were followed.
        without_plan: as of `Ran`.
        may_drop_plan: steps that keep the budget without a plan may run so.
    """

    measured_bytes: int
    evicted_bytes: int = 0
    backwards: int = 1
    followed: bool = True
    recorded: bool = True
    without_plan: bool = False
    may_drop_plan: bool = True

    @classmethod
    def of(cls, ran: Ran, measured_bytes: int, may_drop_plan: bool) -> Outcome:
        """What a step showed by now."""
        director = ran.director
        return cls(
            measured_bytes,
            ran.findings.evicted_bytes,
            ran.watch.backwards,
            director is None or not director.departed,
            director is not None,
            ran.without_plan,
            may_drop_plan,
        )


def after(kind: Kind, outcome: Outcome) -> After:
    """What follows a step of this kind."""
    plan, took = kind.plan, outcome.measured_bytes
    assert plan is not None
    limit = plan.budget_bytes
    if limit is None:
        return After.NOTHING
    if took <= limit + budgets.slack_bytes(limit):
        if outcome.without_plan or plan.changes_nothing:
            return After.NOTHING
        known = outcome.may_drop_plan and outcome.backwards == 1 and outcome.followed and not plan.moves
        fits = known and took + outcome.evicted_bytes <= limit
        return After.NOTE_FITS if fits else After.NOTE_NEEDS_PLAN
    if took <= kind.accepted_bytes:
        return After.NOTHING
    if outcome.without_plan:
        return After.RUN_UNDER_PLAN
    if kind.may_look_again and plan.changes_nothing and not outcome.recorded:
        return After.LOOK_AT_UNSEEN
    if kind.may_look_again and not outcome.followed:
        return After.LOOK_AT_OTHERS
    return After.ONLY_TELL if outcome.backwards > kind.backwards else After.PLAN_WITH_LESS


def learn(kind: Kind, ran: Ran, outcome: Outcome) -> str:
    """Decide what follows a step, and note it with its kind.

    Returns:
        A warning, or an empty text.
    """
    if ran.margin_bytes and outcome.backwards > kind.backwards:  # only a kept graph made it take more
        kind.margin_bytes -= ran.margin_bytes
        ran.margin_bytes, kind.replan = 0, None
    action = after(kind, outcome)
    predicted, limit, took = ran.plan.predicted_peak_bytes, ran.plan.budget_bytes, outcome.measured_bytes
    if action in (After.NOTE_FITS, After.NOTE_NEEDS_PLAN, After.RUN_UNDER_PLAN):
        kind.note_size(ran.key, action is After.NOTE_FITS)
    elif action in (After.LOOK_AT_UNSEEN, After.LOOK_AT_OTHERS):
        kind.look_again = kind.varies = True
    elif action is After.PLAN_WITH_LESS:
        assert limit is not None
        more = max(0, took - max(predicted, limit - budgets.slack_bytes(limit)))
        kind.margin_bytes += more - ran.margin_bytes  # each backward of a step counts anew
        ran.margin_bytes, kind.replan = more, Replan.TOOK_MORE
    if action not in _TOLD or limit is None:
        return ""
    return (
        f"a planned step took {budgets.format_bytes(took)} where {budgets.format_bytes(predicted)} was "
        f"predicted, {took - limit:,} bytes above the budget of {budgets.format_bytes(limit)}: "
        f"{_TOLD[action]}"
    )
