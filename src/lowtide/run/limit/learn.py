"""What a step under a plan teaches about its kind, when its backward ends."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide import budget as budgets
from lowtide.plan.data import Plan
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.kinds import Kind
from lowtide.run.limit.watch import StepWatch
from lowtide.run.record.directors import PlanDirector
from lowtide.run.record.verify import Findings


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
    def given_up_bytes(self) -> int:
        """The most that it would have held besides, had nothing been given up."""
        here = self.findings.given_up_bytes if self.findings is not None else 0
        return here + (self.watch.replays.given_up_bytes if self.watch.replays is not None else 0)


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
            kind.notes_size(ran.key, sure and measured_bytes + ran.given_up_bytes <= limit)
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
