"""What a step under a plan showed, and what follows from it before the next step.

`after` decides, and changes nothing; `learn` carries the decision out; `said` is what a step that took more
than its budget is told of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from lowtide import budget as budgets
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.kinds import Kind
from lowtide.run.limit.planned import Planned
from lowtide.run.messages import OF_GRAPH, Overruns
from lowtide.run.record.directors import PlanDirector
from lowtide.run.record.verify import Findings

_LONGER = 0.1  # a step with a larger share of operations that its plan lacks is looked at


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
    TELL_OF_GRAPH = auto()
    """Its backward made a graph of its own; no plan would help."""
    PLAN_WITH_LESS = auto()
    """It took more than predicted; plan again with that much less."""
    STAY = auto()
    """It took more than predicted, and no plan leaves that much free."""
    NEW_PLAN = auto()
    """It took more, and its plan is in force no more."""


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
    After.TELL_OF_GRAPH: (
        f"{OF_GRAPH}. Run such steps on a part of the batch, or give a budget of what they take; steps "
        "without it keep to their plan"
    ),
    After.PLAN_WITH_LESS: "lowtide plans again with that much less",
    After.STAY: "no plan leaves that much of it free, so the plan stays; only a larger budget would hold",
    After.NEW_PLAN: "later steps run under a newer plan than this one did",
}


@dataclass
class Outcome:
    """A step under a plan, and what it showed when a backward through it ended.

    Attributes:
        key: the step's own; its plan may be for larger ones.
        planned: what it ran under.
        without_plan: it ran as it is, since steps of its size were seen to need no plan.
        may_drop_plan: steps that keep the budget without a plan may run so.
        crowded: other limited models may take part in it, so its peak is not its own.
        director: followed its operations, or ``None`` where it was not recorded.
        findings: of its forward: the most that it would have taken on top without evictions.
        measured_bytes: its peak, resident bytes included; ``None`` where that is not known.
        backwards: how many ran so far.
        margin_bytes: what it added to its kind's margin.
        makes_graph: a backward through it was run with ``create_graph=True``.
        told: what followed it and what it took when it was last said to be above the budget.
    """

    key: StepKey
    planned: Planned
    without_plan: bool = False
    may_drop_plan: bool = True
    crowded: bool = False
    director: PlanDirector | None = None
    findings: Findings = field(default_factory=Findings)
    measured_bytes: int | None = None
    backwards: int = 1
    margin_bytes: int = 0
    makes_graph: bool = False
    told: tuple[After, int] | None = None


def after(kind: Kind, outcome: Outcome) -> After:
    """What follows a step of this kind."""
    plan, took, director = outcome.planned.plan, outcome.measured_bytes, outcome.director
    limit = plan.budget_bytes
    if limit is None or took is None:
        return After.NOTHING
    followed = director is None or not director.departed
    if took <= limit + budgets.slack_bytes(limit):
        if outcome.without_plan or plan.changes_nothing:
            return After.NOTHING
        known = outcome.may_drop_plan and outcome.backwards == 1 and followed and not plan.moves
        fits = known and took + outcome.findings.evicted_bytes <= limit
        return After.NOTE_FITS if fits else After.NOTE_NEEDS_PLAN
    if outcome.makes_graph and not kind.makes_graph:
        return After.TELL_OF_GRAPH
    if took <= outcome.planned.accepted_bytes:
        return After.STAY
    if outcome.without_plan:
        return After.RUN_UNDER_PLAN
    if kind.may_look_again and plan.changes_nothing and director is None:
        return After.LOOK_AT_UNSEEN
    if kind.may_look_again and not followed:
        return After.LOOK_AT_OTHERS
    return After.ONLY_TELL if outcome.backwards > kind.backwards else After.PLAN_WITH_LESS


def learn(kind: Kind, outcome: Outcome) -> After:
    """Decide what follows a step, and note it with its kind."""
    if kind.planned is not outcome.planned:
        return After.NEW_PLAN
    extra = outcome.director.extra if outcome.director is not None else 0
    kind.varies |= extra > 0
    kind.wants_look |= extra > _LONGER * len(outcome.planned.plan.program) and kind.may_look_again
    if outcome.backwards > kind.backwards:  # only a kept graph made it take more
        kind.margin_bytes -= outcome.margin_bytes
        outcome.margin_bytes = 0
    action, planned = after(kind, outcome), outcome.planned
    predicted, limit = planned.plan.predicted_peak_bytes, planned.plan.budget_bytes
    took = outcome.measured_bytes
    if action in (After.NOTE_FITS, After.NOTE_NEEDS_PLAN, After.RUN_UNDER_PLAN):
        planned.note_size(outcome.key, action is After.NOTE_FITS)
    elif action in (After.LOOK_AT_UNSEEN, After.LOOK_AT_OTHERS):
        kind.wants_look = kind.varies = True
    elif action is After.PLAN_WITH_LESS:
        assert limit is not None and took is not None
        more = max(0, took - max(predicted, limit - budgets.slack_bytes(limit)))
        kind.margin_bytes += more - outcome.margin_bytes  # each backward of a step counts anew
        outcome.margin_bytes = more
    return action


def said(overruns: Overruns, outcome: Outcome, action: After) -> str:
    """The warning after a backward of a step; empty where the step kept its budget, or where the same was
    said after an earlier backward of it.
    """
    plan, took = outcome.planned.plan, outcome.measured_bytes
    limit = plan.budget_bytes
    if limit is None or took is None or took <= limit + budgets.slack_bytes(limit):
        return ""
    before, outcome.told = outcome.told, (action, took)
    if before == outcome.told:
        return ""
    same = before is not None and before[0] is action
    return overruns.text(took, limit, plan.predicted_peak_bytes, _TOLD[action], before is None, same)
