"""What follows a step under a plan, by what it showed: the table of decisions, and what each one changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowtide.graph import StepGraph
from lowtide.plan.data import Plan
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.kinds import Kind
from lowtide.run.limit.outcome import After, Outcome, after, learn, said
from lowtide.run.limit.planned import Planned
from lowtide.run.messages import Overruns
from lowtide.run.record.directors import PlanDirector
from lowtide.run.record.verify import Findings

LIMIT = 1 << 20
PLAN = Plan("g", "optimal", LIMIT, {}, frozenset(), (3,), 2 * LIMIT, LIMIT - 1000, 1.0, 0.1)
FITS = replace(PLAN, replayed=())
OVER = 2 * LIMIT
GRAPH = StepGraph((), (), (), (), (), 0, 0.0)


def key(rows: int) -> StepKey:
    return StepKey(((rows, 8),), (), "", 0, (), 0, 0, 0)


def planned_of(plan: Plan, accepted_bytes: int = 0) -> Planned:
    return Planned(key(100), GRAPH, plan, (0, 0), accepted_bytes)


def kind_of(planned: Planned, backwards: int = 1) -> Kind:
    return Kind(key(100), GRAPH, planned, wants_look=False, looks=1, backwards=backwards)


def ran(
    planned: Planned,
    measured_bytes: int,
    evicted_bytes: int = 0,
    *,
    rows: int = 100,
    followed: bool = True,
    recorded: bool = True,
    **more: Any,
) -> Outcome:
    director = PlanDirector(())
    director.skipped = int(not followed)
    findings = Findings(evicted_bytes=evicted_bytes)
    known = {"director": director if recorded else None, "findings": findings}
    return Outcome(key(rows), planned, **known, measured_bytes=measured_bytes, **more)


@pytest.mark.parametrize(
    ("plan", "state", "took", "step", "expected"),
    [
        # within the budget
        (PLAN, {}, LIMIT, {}, After.NOTE_FITS),
        (PLAN, {}, LIMIT // 2, {"evicted_bytes": LIMIT // 2}, After.NOTE_FITS),
        (PLAN, {}, LIMIT // 2, {"evicted_bytes": LIMIT // 2 + 1}, After.NOTE_NEEDS_PLAN),
        (PLAN, {}, LIMIT, {"followed": False}, After.NOTE_NEEDS_PLAN),
        (PLAN, {}, LIMIT, {"backwards": 2}, After.NOTE_NEEDS_PLAN),
        (PLAN, {}, LIMIT, {"may_drop_plan": False}, After.NOTE_NEEDS_PLAN),
        (PLAN, {}, LIMIT, {"without_plan": True, "recorded": False}, After.NOTHING),
        (FITS, {}, LIMIT, {"recorded": False}, After.NOTHING),
        (replace(PLAN, budget_bytes=None), {}, OVER, {}, After.NOTHING),
        # above it
        (PLAN, {"accepted_bytes": OVER}, OVER, {}, After.STAY),
        (PLAN, {"accepted_bytes": OVER - 1}, OVER, {}, After.PLAN_WITH_LESS),
        (PLAN, {}, OVER, {"without_plan": True}, After.RUN_UNDER_PLAN),
        (PLAN, {}, OVER, {"without_plan": True, "followed": False}, After.RUN_UNDER_PLAN),
        (FITS, {}, OVER, {"recorded": False}, After.LOOK_AT_UNSEEN),
        (FITS, {}, OVER, {}, After.PLAN_WITH_LESS),
        (PLAN, {}, OVER, {"followed": False}, After.LOOK_AT_OTHERS),
        (PLAN, {}, OVER, {"followed": False, "backwards": 2}, After.LOOK_AT_OTHERS),
        (PLAN, {}, OVER, {"backwards": 2}, After.ONLY_TELL),
        (PLAN, {"backwards": 2}, OVER, {"backwards": 2}, After.PLAN_WITH_LESS),
        (PLAN, {}, OVER, {}, After.PLAN_WITH_LESS),
    ],
)
def test_what_follows_a_step(
    plan: Plan, state: dict[str, int], took: int, step: dict[str, Any], expected: After
) -> None:
    planned = planned_of(plan, state.get("accepted_bytes", 0))
    kind = kind_of(planned, state.get("backwards", 1))
    before = dict(vars(kind)), dict(vars(planned))
    assert after(kind, ran(planned, took, **step)) is expected
    assert (vars(kind), vars(planned)) == before, "deciding changes nothing"


@pytest.mark.parametrize("step", [{"recorded": False}, {"followed": False}])
def test_a_kind_that_was_looked_at_often_is_planned_with_less(step: dict[str, bool]) -> None:
    kind = kind_of(planned := planned_of(FITS))
    kind.looks = 8
    assert after(kind, ran(planned, OVER, **step)) is After.PLAN_WITH_LESS


def test_what_is_not_measured_says_nothing_but_the_operations_that_ran() -> None:
    kind = kind_of(planned := planned_of(PLAN))
    step = ran(planned, OVER)
    step.measured_bytes = None
    assert learn(kind, step) is After.NOTHING and not kind.varies and not kind.wants_look
    assert step.director is not None
    step.director.extra = 1
    assert learn(kind, step) is After.NOTHING and kind.varies and kind.wants_look


def test_a_step_that_took_more_is_planned_with_that_much_less() -> None:
    kind = kind_of(planned := planned_of(PLAN))
    step = ran(planned, OVER)
    assert learn(kind, step) is After.PLAN_WITH_LESS
    assert 0 < kind.margin_bytes == step.margin_bytes <= OVER - LIMIT + 8192
    step.measured_bytes = OVER + 5
    learn(kind, step)
    assert kind.margin_bytes == step.margin_bytes, "of a step with several backwards each teaches"
    step.backwards = 2
    assert learn(kind, step) is After.ONLY_TELL
    assert (kind.margin_bytes, step.margin_bytes) == (0, 0), "only a kept graph took more"


def test_a_step_with_other_operations_is_looked_at_again() -> None:
    kind = kind_of(planned := planned_of(PLAN))
    learn(kind, ran(planned, OVER, followed=False))
    assert kind.wants_look and kind.varies and kind.margin_bytes == 0


def test_sizes_are_noted() -> None:
    kind = kind_of(planned := planned_of(PLAN))
    assert learn(kind, ran(planned, LIMIT // 2, rows=50)) is After.NOTE_FITS
    assert planned.fits_without_plan(key(50)) and not planned.fits_without_plan(key(60))
    assert learn(kind, ran(planned, OVER, rows=40, without_plan=True)) is After.RUN_UNDER_PLAN
    assert not planned.fits_without_plan(key(50)), "what does not fit at 40 rows does not at 50"


def test_a_plan_that_stays_accepts_what_its_steps_take() -> None:
    kind = kind_of(planned := planned_of(PLAN))
    learn(kind, ran(planned, OVER))
    planned.accept(kind.margin_bytes, (0, 0))
    assert after(kind, ran(planned, OVER)) is After.STAY


def test_a_step_whose_plan_was_replaced_teaches_nothing() -> None:
    kind = kind_of(planned_of(PLAN))
    assert learn(kind, ran(planned_of(PLAN), OVER)) is After.NEW_PLAN
    assert kind.margin_bytes == 0


def test_each_step_above_its_budget_is_told_the_first_ones_at_length() -> None:
    overruns, planned = Overruns(), planned_of(PLAN)
    texts = [said(overruns, ran(planned, OVER), act) for act in (After.PLAN_WITH_LESS, After.STAY) * 5]
    assert all("1,048,576 bytes above the budget of 1 MiB" in text for text in texts)
    assert [" so far)" in text for text in texts] == [False] * 6 + [True] * 4
    assert "10 of this limit's steps" in texts[-1]
    assert said(overruns, ran(planned, LIMIT), After.NOTE_FITS) == ""
    step = ran(planned, OVER)
    step.measured_bytes = None
    assert said(overruns, step, After.NOTHING) == "", "what is not measured"


def test_the_backwards_of_one_step_count_once_and_are_told_as_they_take_more() -> None:
    overruns, step = Overruns(), ran(planned_of(PLAN), OVER)
    assert said(overruns, step, After.PLAN_WITH_LESS)
    assert not said(overruns, step, After.PLAN_WITH_LESS), "the second backward took no more"
    step.measured_bytes = OVER + 1
    assert said(overruns, step, After.ONLY_TELL)
    assert overruns.steps.total() == 1
