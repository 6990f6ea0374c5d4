"""What each piece of evidence changes of a cached plan, and that nothing else changes it."""

from __future__ import annotations

import ast
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_model import batch, needs_meter, small

import lowtide
from lowtide.graph import Operation, StepGraph
from lowtide.plan.data import Plan
from lowtide.run.limit import machine
from lowtide.run.limit.entry import BesidePlan, Entry, History, Planned, Seen, Traits
from lowtide.run.limit.entry_states import Action, State
from lowtide.run.limit.key import StepKey

S, A = State, Action
LIMIT = 1 << 20
OVER = 2 * LIMIT
PLAN = Plan("g", "optimal", LIMIT, {}, frozenset(), (3,), 2 * LIMIT, LIMIT - 1000, 1.0, 0.1)
FITS = replace(PLAN, replayed=())
GRAPH = StepGraph((), (), (), (), ())

RECORDS = (Entry, Planned, History, BesidePlan, Traits, Seen)

OF_OTHER_CLASSES = {
    "compiled/flow.py self._step.backwards",
    "compiled/flow.py self._step.state",
    "optim/elementwise.py made.state",
    "trace/tracer.py found.key",
    "train/trainer.py result.seconds",
}
"""Assignments in all of lowtide to what has a record's field's name, and is no record."""


def test_only_the_state_machine_assigns_the_fields_of_the_records() -> None:
    """Elsewhere an attribute of such a name is assigned only by a class that is no record (``self``), or to
    `OF_OTHER_CLASSES`.
    """
    names = {field.name for record in RECORDS for field in fields(record)}
    records = {record.__name__ for record in RECORDS}
    folder, found = Path(lowtide.__file__).parent, []
    for file in folder.rglob("*.py"):
        tree = ast.parse(file.read_text())
        own = {
            id(part)
            for one in ast.walk(tree)
            if isinstance(one, ast.ClassDef) and one.name not in records
            for part in ast.walk(one)
            if isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == "self"
        }
        for part in ast.walk(tree):
            stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del)
            if stored and part.attr in names and id(part) not in own:
                found.append(f"{file.relative_to(folder)} {ast.unparse(part)}")
    others = [one for one in found if not one.startswith("run/limit/machine.py")]
    assert set(others) <= OF_OTHER_CLASSES and len(found) > len(others)


def test_nobody_else_assigns_them_in_steps_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    writers = set()

    def noted(record: Any, name: str, given: Any) -> None:
        file = sys._getframe(1).f_code.co_filename
        writers.add(file if name in {field.name for field in fields(record)} else "")
        object.__setattr__(record, name, given)

    for record in RECORDS:
        if record is not Planned:  # which nobody can assign
            monkeypatch.setattr(record, "__setattr__", noted)
    model = small()
    handle = lowtide.limit_memory(model, "80%", progress=False)
    for rows in (40, 40, 20, 60):
        model(batch(rows)).backward()
    handle.set_budget("90%")
    assert handle.plan is not None
    model(batch()).backward()
    handle.remove()
    assert writers <= {machine.__file__, "<string>", ""} and machine.__file__ in writers
    with pytest.raises(FrozenInstanceError):
        planned_entry().planned.plan = PLAN  # type: ignore


def key(rows: int = 100, gradients: int = 0) -> StepKey:
    return StepKey(((rows, 8),), (), "", 0, (), 0, 0, gradients)


def graph(operations: int) -> StepGraph:
    return replace(
        GRAPH,
        operations=tuple(Operation(k, "aten.sin.default", (), (), "forward") for k in range(operations)),
    )


def planned_entry(plan: Plan = PLAN, profiles: int = 0) -> Entry:
    entry = Entry(key(), seen=Seen(profiles))
    assert machine.on_profiled(entry, GRAPH, verified=True) is A.PLAN
    assert machine.on_plan_made(entry, Planned(entry.key, GRAPH, GRAPH, plan), version=0) is A.RUN
    return entry


def ran(entry: Entry, took: int | None, director: Any = None, **more: Any) -> machine.Ended:
    """What a planned step shows when it has ended."""
    assert entry.planned is not None
    if director is not None:
        more = {"extra": director.extra, "departed": director.departed, **more}
    return machine.Ended(entry.planned, took, recorded=director is not None, **more)


def followed(extra: int = 0, departed: bool = False) -> Any:
    return SimpleNamespace(extra=extra, departed=departed or extra > 0)


def test_a_refused_entry_is_planned_for_once_another_budget_was_given() -> None:
    entry = Entry(key())
    assert machine.on_profiled(entry, graph(3), verified=True) is A.PLAN
    assert machine.on_plan_refused(entry, version=3) is A.RAISE and entry.state is S.REFUSED
    assert machine.on_called(entry, version=3) is A.PROFILE
    assert machine.on_called(entry, version=4) is A.PLAN
    assert machine.on_plan_refused(entry, version=4) is A.RAISE
    assert machine.on_profiled(entry, graph(2), verified=True) is A.PLAN, "a shorter step may fit"
    planned = planned_entry()
    assert machine.on_called(planned, version=1) is A.PLAN
    assert machine.on_plan_refused(planned, version=1) is A.RAISE and planned.state is S.STALE


def test_varying_steps_are_refused_another_budget_that_is_too_small() -> None:
    entry = planned_entry()
    for count in (9, 8):
        machine.on_ended(entry, ran(entry, LIMIT // 2, ran=(0, count)))
    assert entry.state is S.VARYING and machine.on_called(entry, version=1) is A.PLAN
    assert machine.on_plan_refused(entry, version=1) is A.RAISE and entry.state is S.STALE


def test_a_step_whose_operations_are_not_its_own_to_see_is_profiled_aside() -> None:
    entry = Entry(key())
    assert machine.on_called(entry, version=0, shared=True) is A.PROFILE_ASIDE
    assert machine.on_called(entry, version=0) is A.PROFILE, "the next one may be alone"
    assert machine.on_no_loss(entry, shared=True) is A.PROFILE
    assert machine.on_called(entry, version=0, backward_unseen=True) is A.PROFILE_ASIDE
    assert machine.on_called(entry, version=0) is A.PROFILE_ASIDE, "a model's backward stays where it is"
    assert machine.on_no_loss(entry, shared=False) is A.RAISE


def test_a_profile_that_did_not_see_all_or_saw_others_is_planned_from_no_more() -> None:
    entry = Entry(key())
    assert machine.on_profile_ended(entry, backward_unseen=False, shared=False) is A.NOTHING
    assert machine.on_profile_ended(entry, backward_unseen=False, shared=True) is A.DISCARD
    assert machine.on_called(entry, version=0) is A.PROFILE, "the next one may be alone"
    assert machine.on_profile_ended(entry, backward_unseen=True, shared=False) is A.DISCARD
    assert machine.on_called(entry, version=0) is A.PROFILE_ASIDE


def test_where_ranks_wait_a_refused_step_is_planned_for_the_smallest_budget() -> None:
    entry = Entry(key())
    assert machine.on_profiled(entry, GRAPH, verified=True) is A.PLAN
    assert machine.on_plan_refused(entry, version=0, peers_wait=True) is A.PLAN_SMALLEST
    planned = Planned(entry.key, GRAPH, GRAPH, PLAN)
    assert machine.on_plan_made(entry, planned, version=0) is A.RUN and entry.state is S.PLANNED
    assert machine.on_called(entry, version=1) is A.PLAN
    assert machine.on_plan_refused(entry, version=1, peers_wait=True) is A.RAISE, "there is a plan"


def test_a_step_that_was_not_verified_is_profiled_again() -> None:
    entry = Entry(key())
    assert machine.on_profiled(entry, GRAPH, verified=False, backwards=2) is A.PROFILE
    assert entry.profiled is None and entry.traits.backwards == 1 and entry.state is S.NEW
    assert machine.on_profiled(entry, GRAPH, verified=True) is A.PLAN and entry.seen.profiles == 2


def test_how_a_planned_step_runs() -> None:
    def begins(entry: Entry, can_evict: bool = True, unkeyed: bool = False) -> Action:
        assert entry.planned is not None
        return machine.on_forward_begins(entry, entry.planned, can_evict, unkeyed)

    entry, fits, alike = planned_entry(), planned_entry(FITS), planned_entry()
    assert begins(entry) is A.RUN and begins(fits) is A.PASS
    assert begins(entry, unkeyed=True) is A.TRY and begins(entry, can_evict=False, unkeyed=True) is A.RUN
    free = planned_entry(replace(FITS, budget_bytes=None))
    for one in (entry, fits, free):
        one.seen.may_differ = True
    assert begins(entry) is begins(fits) is A.TRY
    assert begins(fits, can_evict=False) is A.RUN, "it is recorded, to see whether it departs"
    assert begins(free, can_evict=False) is A.PASS
    for one in (entry, alike):
        assert one.planned is not None
        machine.count_step(one.planned)
        assert begins(one, unkeyed=True) is A.RUN, "tried once"


def test_second_derivatives_that_no_profiled_step_had_are_left_nothing() -> None:
    for known, action in ((False, A.LEAVE_NOTHING), (True, A.LEAVE_MARGIN)):
        entry = Entry(key())
        machine.on_profiled(entry, GRAPH, verified=True, makes_graph=known)
        machine.on_plan_made(entry, Planned(entry.key, GRAPH, GRAPH, PLAN), version=0)
        row = machine.on_ended(entry, ran(entry, OVER, makes_graph=True))
        assert row.action is action and ("create_graph" in row.warning) != known
        assert (entry.beside.margin_bytes > 0) == known


def test_what_is_not_measured_says_nothing_but_the_operations_that_ran() -> None:
    entry = planned_entry()
    assert machine.on_ended(entry, ran(entry, None, director=followed())).action is A.NOTHING
    machine.on_ended(entry, ran(entry, LIMIT // 2, departed=True))
    assert entry.state is S.PLANNED, "it kept its budget, and did not try"
    assert not entry.seen.may_differ and not entry.wants_profile
    assert machine.on_ended(entry, ran(entry, None, director=followed(extra=1))).action is A.DOUBT
    assert entry.seen.may_differ and entry.state is S.DOUBTED


def test_a_step_that_took_more_is_planned_with_that_much_less() -> None:
    entry = planned_entry()
    taught = machine.on_ended(entry, ran(entry, OVER))
    assert taught.action is A.LEAVE_MARGIN
    assert 0 < entry.beside.margin_bytes == taught.added_bytes <= OVER - LIMIT + 8192
    assert machine.on_called(entry, version=0) is A.PLAN
    entry = planned_entry()
    added = 0
    for took in (OVER, OVER + 5):
        added = machine.on_ended(entry, ran(entry, took, added_bytes=added)).added_bytes
        assert entry.beside.margin_bytes == added, "of a step with several backwards each teaches"
    taught = machine.on_ended(entry, ran(entry, OVER + 5, backwards=2, added_bytes=added))
    assert "retain_graph" in taught.warning
    assert (entry.beside.margin_bytes, taught.added_bytes) == (0, 0), "only a kept graph took more"
    assert machine.on_called(entry, version=0) is A.RUN


def test_a_buffer_that_a_thread_held_for_longer_changes_no_plan_until_it_comes_again() -> None:
    moved = LIMIT // 4
    gathers = replace(
        GRAPH,
        operations=(Operation(0, "c10d._allgather_base_.default", (), (), "forward", scratch_bytes=moved),),
    )
    for late, took in ((True, PLAN.predicted_peak_bytes + moved), (False, OVER)):
        entry = Entry(key())
        machine.on_profiled(entry, gathers, verified=True)
        machine.on_plan_made(entry, Planned(entry.key, gathers, gathers, PLAN), version=0)
        assert (machine.on_ended(entry, ran(entry, took)).action is A.WAIT) == late
        assert (entry.beside.margin_bytes == 0) == late
        assert machine.on_ended(entry, ran(entry, LIMIT)).action is A.NOTHING
        assert (machine.on_ended(entry, ran(entry, took)).action is A.WAIT) == late
        assert (
            machine.on_ended(entry, ran(entry, took)).action is A.LEAVE_MARGIN and entry.beside.margin_bytes
        )


@pytest.mark.parametrize("director", [None, followed(departed=True)])
def test_an_entry_that_was_profiled_often_is_planned_with_less(director: Any) -> None:
    plan = FITS if director is None else PLAN
    entry = planned_entry(plan)
    assert machine.on_ended(entry, ran(entry, OVER, director=director)).action is A.DOUBT
    assert entry.wants_profile and entry.seen.may_differ and entry.beside.margin_bytes == 0
    entry = planned_entry(plan, profiles=8)
    assert machine.on_ended(entry, ran(entry, OVER, director=director)).action is A.LEAVE_MARGIN


def test_a_plan_that_stays_accepts_what_its_steps_take() -> None:
    entry = planned_entry()
    machine.on_ended(entry, ran(entry, OVER))
    assert machine.on_called(entry, version=0) is A.PLAN
    assert machine.on_plan_refused(entry, version=0) is A.ACCEPT
    assert machine.on_called(entry, version=0) is A.RUN
    assert "only a larger budget" in machine.on_ended(entry, ran(entry, OVER)).warning


def test_another_budget_is_refused_only_where_no_step_had_taken_more() -> None:
    entry = planned_entry()
    machine.on_ended(entry, ran(entry, OVER))
    assert machine.on_called(entry, version=1) is A.PLAN
    assert machine.on_plan_refused(entry, version=1) is A.PLAN and entry.beside.margin_bytes == 0
    assert machine.on_plan_refused(entry, version=1) is A.RAISE


def test_what_a_graph_does_not_show_is_left_free_when_the_margin_goes() -> None:
    entry = Entry(key())
    machine.on_profiled(entry, GRAPH, verified=True, checkpoints=2)
    hidden = entry.beside.hidden_bytes
    assert hidden == 2 * torch.default_generator.get_state().nbytes
    machine.on_plan_made(entry, Planned(entry.key, GRAPH, GRAPH, PLAN), version=0)
    machine.on_ended(entry, ran(entry, OVER))
    machine.on_called(entry, version=1)
    assert machine.on_plan_refused(entry, version=1) is A.PLAN
    assert (entry.beside.margin_bytes, entry.beside.hidden_bytes) == (0, hidden)


def test_a_step_whose_plan_was_replaced_teaches_nothing() -> None:
    entry = planned_entry()
    step = ran(entry, OVER)
    machine.set_plan(entry, Planned(entry.key, GRAPH, GRAPH, PLAN))
    assert "a newer plan" in machine.on_ended(entry, step).warning
    assert entry.beside.margin_bytes == 0


def test_the_longest_profiled_step_is_planned_for() -> None:
    entry = planned_entry()
    machine.on_ended(entry, ran(entry, OVER, director=followed(extra=9)))
    assert machine.on_profiled(entry, graph(3), verified=True, backwards=2) is A.PLAN
    machine.on_plan_made(entry, Planned(entry.key, graph(3), graph(3), PLAN), version=0)
    machine.on_ended(entry, ran(entry, OVER, director=followed(extra=9), can_evict=False))
    assert machine.on_profiled(entry, graph(2), verified=True) is A.NOTHING
    assert entry.profiled == graph(3) and entry.state is S.PLANNED and entry.traits.backwards == 2


def test_steps_that_differ_evict_on_demand_and_learn_what_to_leave_free() -> None:
    entry = planned_entry()
    assert machine.on_ended(entry, ran(entry, LIMIT // 2, ran=(0, 9))).action is A.NOTHING
    assert machine.on_ended(entry, ran(entry, LIMIT // 2, ran=(2, 7), can_evict=False)).action is A.NOTHING
    assert machine.on_ended(entry, ran(entry, OVER, ran=(2, 7))).action is A.LEAVE_MARGIN, "the same again"
    assert machine.on_ended(entry, ran(entry, LIMIT, resized=True, can_evict=False)).action is A.NOTHING
    assert "other operations each time" in machine.on_ended(entry, ran(entry, OVER, ran=(0, 8))).warning
    assert entry.state is S.VARYING and machine.on_called(entry, version=0) is A.RUN
    assert machine.on_ended(entry, ran(entry, LIMIT + 4096, ran=(0, 8))).action is A.LEAVE_RESERVE
    assert 4096 < entry.beside.reserve_bytes < 8192
    assert machine.on_ended(entry, ran(entry, 9 * LIMIT, ran=(0, 8))).action is A.LEAVE_RESERVE
    assert entry.beside.reserve_bytes == LIMIT // 4, "others made it larger"
    assert machine.on_called(entry, version=1) is A.PLAN
    assert machine.on_plan_made(entry, Planned(entry.key, GRAPH, GRAPH, PLAN), version=1) is A.VARY
    assert entry.state is S.VARYING and entry.beside.margin_bytes == 0
    adds = Entry(key(gradients=1))
    machine.borrow(adds, entry)
    assert adds.traits.differed and adds.beside.reserve_bytes == entry.beside.reserve_bytes


def test_steps_whose_sizes_values_decide_evict_on_demand() -> None:
    entry = planned_entry()
    assert machine.on_ended(entry, ran(entry, LIMIT // 2, resized=True)).action is A.VARY
    assert entry.state is S.VARYING and entry.traits.differed


def test_varying_steps_whose_longest_fits_no_plan_are_planned_for_once() -> None:
    """The plan in force counted as made for another margin: each later step searched again."""
    entry = planned_entry()
    machine.on_ended(entry, ran(entry, OVER, ran=(0, 9)))
    assert machine.on_called(entry, version=0) is A.PLAN and entry.beside.margin_bytes
    machine.on_plan_made(entry, Planned(entry.key, GRAPH, GRAPH, PLAN), version=0)
    step = ran(entry, LIMIT // 2, director=followed(extra=9), ran=(0, 9))
    assert machine.on_ended(entry, step).action is A.DOUBT
    assert machine.on_profiled(entry, graph(3), verified=True, ran=(2, 9)) is A.PLAN
    assert machine.on_plan_refused(entry, version=0) is A.VARY and entry.state is S.VARYING
    assert machine.on_called(entry, version=0) is A.RUN


def test_a_kept_graph_takes_back_no_more_than_is_left_free() -> None:
    """What a plan had gone without meanwhile was taken back once more: the margin was negative."""
    entry = planned_entry()
    added = machine.on_ended(entry, ran(entry, OVER)).added_bytes
    machine.on_called(entry, version=0)
    assert added and machine.on_plan_refused(entry, version=0) is A.ACCEPT and entry.beside.margin_bytes == 0
    machine.on_ended(entry, ran(entry, OVER, backwards=2, added_bytes=added))
    assert entry.beside.margin_bytes == 0 and machine.on_called(entry, version=0) is A.RUN


def test_a_first_step_that_differs_has_the_next_one_profiled_which_says_whether_steps_vary() -> None:
    for second, state in (((0, 8), S.VARYING), ((0, 9), S.PLANNED)):
        for operations in (0, 3):  # no more than the first had, or more
            entry = planned_entry()
            step = ran(entry, LIMIT // 2, ran=(0, 9), tried=True, departed=True)
            assert machine.on_ended(entry, step).action is A.NOTHING and entry.state is S.DOUBTED
            action = machine.on_profiled(entry, graph(operations), verified=True, ran=second)
            if action is A.PLAN:
                planned = Planned(entry.key, graph(operations), graph(operations), PLAN)
                follows = A.VARY if state is S.VARYING else A.RUN
                assert machine.on_plan_made(entry, planned, version=0) is follows
            assert entry.state is state and entry.seen.ran == second


def test_a_sibling_begins_with_what_is_known() -> None:
    entry = planned_entry()
    machine.on_ended(entry, ran(entry, OVER))
    adds = Entry(key(gradients=1))
    machine.borrow(adds, entry)
    assert adds.beside.margin_bytes == entry.beside.margin_bytes
    assert machine.on_called(adds, version=0) is A.PLAN
    assert machine.on_plan_refused(adds, version=0) is A.PLAN
    assert machine.on_plan_refused(adds, version=0) is A.RAISE
    assert machine.on_called(adds, version=0) is A.PROFILE, "the sibling's graph was planned for once"
    assert machine.on_called(adds, version=1) is A.PLAN


# ---- on models ------------------------------------------------------------------------------------


@needs_meter
def test_a_budget_holds_again_after_a_step_that_something_else_made_larger() -> None:
    """What that step took more was left free for good, so that smaller budgets were refused."""
    model = small()
    handle = lowtide.limit_memory(model, "90%", progress=False)
    model(batch()).backward()
    smallest = lowtide.limit_memory(small(), "min", progress=False)
    smallest.model(batch()).backward()
    assert smallest.plan is not None and smallest.plan.budget_bytes is not None
    model.zero_grad()
    loss, held = model(batch()), []
    loss.register_hook(lambda g: held.append(torch.zeros(1 << 20)))
    with pytest.warns(lowtide.LowtideWarning, match="above the budget"):
        loss.backward()
    model.zero_grad()
    handle.set_budget(smallest.plan.budget_bytes)
    with pytest.warns(lowtide.LowtideWarning, match="as if no step had taken more"):
        model(batch()).backward()
    assert handle.measured_peak_bytes is not None and handle.plan is not None
    assert handle.measured_peak_bytes <= smallest.plan.budget_bytes
