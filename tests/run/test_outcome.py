"""What follows a step under a plan, by what it showed: the table of decisions, and what each one changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowtide.plan.data import Plan
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.kinds import Kind, Replan
from lowtide.run.limit.outcome import After, Outcome, Ran, after, learn

LIMIT = 1 << 20
PLAN = Plan("g", "optimal", LIMIT, {}, frozenset(), (3,), 2 * LIMIT, LIMIT - 1000, 1.0, 0.1)
FITS = replace(PLAN, replayed=())
OVER = 2 * LIMIT


def key(rows: int) -> StepKey:
    return StepKey(((rows, 8),), (), "", 0, (), 0, 0, 0)


def kind_of(plan: Plan, **state: Any) -> Kind:
    return Kind(key(100), plan=plan, looks=1, **state)


@pytest.mark.parametrize(
    ("plan", "state", "outcome", "expected"),
    [
        # within the budget
        (PLAN, {}, Outcome(LIMIT), After.NOTE_FITS),
        (PLAN, {}, Outcome(LIMIT // 2, LIMIT // 2), After.NOTE_FITS),
        (PLAN, {}, Outcome(LIMIT // 2, LIMIT // 2 + 1), After.NOTE_NEEDS_PLAN),
        (PLAN, {}, Outcome(LIMIT, followed=False), After.NOTE_NEEDS_PLAN),
        (PLAN, {}, Outcome(LIMIT, backwards=2), After.NOTE_NEEDS_PLAN),
        (PLAN, {}, Outcome(LIMIT, may_drop_plan=False), After.NOTE_NEEDS_PLAN),
        (PLAN, {}, Outcome(LIMIT, without_plan=True, recorded=False), After.NOTHING),
        (FITS, {}, Outcome(LIMIT, recorded=False), After.NOTHING),
        (replace(PLAN, budget_bytes=None), {}, Outcome(OVER), After.NOTHING),
        # above it
        (PLAN, {"accepted_bytes": OVER}, Outcome(OVER), After.NOTHING),
        (PLAN, {"accepted_bytes": OVER - 1}, Outcome(OVER), After.PLAN_WITH_LESS),
        (PLAN, {}, Outcome(OVER, without_plan=True), After.RUN_UNDER_PLAN),
        (PLAN, {}, Outcome(OVER, without_plan=True, followed=False), After.RUN_UNDER_PLAN),
        (FITS, {}, Outcome(OVER, recorded=False), After.LOOK_AT_UNSEEN),
        (FITS, {}, Outcome(OVER), After.PLAN_WITH_LESS),
        (PLAN, {}, Outcome(OVER, followed=False), After.LOOK_AT_OTHERS),
        (PLAN, {}, Outcome(OVER, followed=False, backwards=2), After.LOOK_AT_OTHERS),
        (PLAN, {}, Outcome(OVER, backwards=2), After.ONLY_TELL),
        (PLAN, {"backwards": 2}, Outcome(OVER, backwards=2), After.PLAN_WITH_LESS),
        (PLAN, {}, Outcome(OVER), After.PLAN_WITH_LESS),
    ],
)
def test_what_follows_a_step(plan: Plan, state: dict[str, Any], outcome: Outcome, expected: After) -> None:
    kind = kind_of(plan, **state)
    before = {**vars(kind), "sizes": {}}
    assert after(kind, outcome) is expected
    assert vars(kind) == before, "deciding changes nothing"


@pytest.mark.parametrize("outcome", [Outcome(OVER, recorded=False), Outcome(OVER, followed=False)])
def test_a_kind_that_was_looked_at_often_is_planned_with_less(outcome: Outcome) -> None:
    kind = kind_of(FITS)
    kind.looks = 8
    assert after(kind, outcome) is After.PLAN_WITH_LESS


def test_a_step_that_took_more_is_planned_with_that_much_less() -> None:
    kind, ran = kind_of(PLAN), Ran(key(100), PLAN)
    said = learn(kind, ran, Outcome(OVER))
    assert said.endswith("lowtide plans again with that much less")
    assert (
        kind.replan is Replan.TOOK_MORE and 0 < kind.margin_bytes == ran.margin_bytes <= OVER - LIMIT + 8192
    )
    learn(kind, ran, Outcome(OVER + 5))
    assert kind.margin_bytes == ran.margin_bytes, "of a step with several backwards each teaches"
    assert "retain_graph" in learn(kind, ran, Outcome(OVER + 5, backwards=2))
    assert (kind.margin_bytes, ran.margin_bytes, kind.replan) == (0, 0, None), "only a kept graph took more"


def test_a_step_with_other_operations_is_looked_at_again() -> None:
    kind = kind_of(PLAN)
    learn(kind, Ran(key(100), PLAN), Outcome(OVER, followed=False))
    assert kind.wants_look and kind.varies and kind.replan is None and kind.margin_bytes == 0


def test_sizes_are_noted() -> None:
    kind = kind_of(PLAN)
    assert learn(kind, Ran(key(50), PLAN), Outcome(LIMIT // 2)) == ""
    assert kind.fits_without_plan(key(50)) and not kind.fits_without_plan(key(60))
    assert learn(kind, Ran(key(40), PLAN, without_plan=True), Outcome(OVER, without_plan=True))
    assert not kind.fits_without_plan(key(50)), "what does not fit at 40 rows does not at 50"


def test_a_plan_that_is_kept_accepts_what_its_steps_take() -> None:
    kind = kind_of(PLAN)
    learn(kind, Ran(key(100), PLAN), Outcome(OVER))
    kind.keep_plan()
    assert kind.replan is None and kind.margin_bytes == 0
    assert after(kind, Outcome(OVER)) is After.NOTHING
