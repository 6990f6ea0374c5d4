"""The state machine of cached plans: its table, and what each piece of evidence changes."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from small_model import batch, needs_meter, small
from thinned_tables import thinned

import lowtide
from lowtide.graph import Operation, StepGraph
from lowtide.plan.data import Plan
from lowtide.run.limit import machine
from lowtide.run.limit.entry import Entry, Planned, Room, Seen, State, Traits
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.machine import TABLE, Action, Ending, Evidence, Fact
from lowtide.run.limit.step import WHY, PlannedStep, Why, why
from lowtide.run.messages import Overruns

S, E, A = State, Evidence, Action
LIMIT = 1 << 20
OVER = 2 * LIMIT
PLAN = Plan("g", "optimal", LIMIT, {}, frozenset(), (3,), 2 * LIMIT, LIMIT - 1000, 1.0, 0.1)
FITS = replace(PLAN, replayed=())
GRAPH = StepGraph((), (), (), (), ())

CASES: list[tuple[State, Evidence, tuple[Fact, ...], State, Action]] = [
    # a step begins
    (S.NEW, E.CALLED, (), S.NEW, A.PROFILE),
    (S.NEW, E.CALLED, ("graph known",), S.STALE, A.PLAN),
    (S.REFUSED, E.CALLED, ("graph known",), S.REFUSED, A.PROFILE),
    (S.REFUSED, E.CALLED, ("graph known", "other budget"), S.STALE, A.PLAN),
    (S.DOUBTED, E.CALLED, ("outdated",), S.DOUBTED, A.PROFILE),
    (S.STALE, E.CALLED, (), S.STALE, A.PLAN),
    (S.PLANNED, E.CALLED, (), S.PLANNED, A.RUN),
    (S.PLANNED, E.CALLED, ("outdated",), S.STALE, A.PLAN),
    (S.VARYING, E.CALLED, (), S.VARYING, A.RUN),
    (S.VARYING, E.CALLED, ("outdated",), S.STALE, A.PLAN),
    # ranks that share the plan
    (S.PLANNED, E.PEERS, ("peer profiles", "peer outdated"), S.DOUBTED, A.NOTHING),
    (S.PLANNED, E.PEERS, ("peer outdated",), S.STALE, A.NOTHING),
    (S.STALE, E.PEERS, ("peer profiles",), S.DOUBTED, A.NOTHING),  # no plan fitted here
    (S.NEW, E.PEERS, ("peer profiles",), S.NEW, A.NOTHING),
    (S.PLANNED, E.PEERS, (), S.PLANNED, A.NOTHING),
    # a step was profiled
    (S.NEW, E.PROFILED, ("unverified",), S.NEW, A.PROFILE),
    (S.DOUBTED, E.PROFILED, ("planned", "shorter"), S.PLANNED, A.NOTHING),
    (S.DOUBTED, E.PROFILED, ("planned", "shorter", "differed"), S.VARYING, A.NOTHING),
    (S.DOUBTED, E.PROFILED, ("planned",), S.STALE, A.PLAN),
    (S.DOUBTED, E.PROFILED, ("planned", "differed"), S.STALE, A.PLAN),
    (S.REFUSED, E.PROFILED, ("shorter", "differed"), S.STALE, A.PLAN),
    (S.REFUSED, E.PROFILED, ("shorter",), S.STALE, A.PLAN),
    # a plan
    (S.STALE, E.PLAN_MADE, (), S.PLANNED, A.RUN),
    (S.STALE, E.PLAN_MADE, ("differed",), S.VARYING, A.RUN),
    (S.STALE, E.PLAN_REFUSED, ("differed", "planned"), S.STALE, A.RAISE),
    (S.STALE, E.PLAN_REFUSED, ("differed", "planned", "same budget"), S.VARYING, A.RUN),
    (S.STALE, E.PLAN_REFUSED, ("margin", "current plan", "planned"), S.PLANNED, A.ACCEPT),
    (S.STALE, E.PLAN_REFUSED, ("margin", "planned"), S.STALE, A.PLAN),
    (S.STALE, E.PLAN_REFUSED, ("current plan", "same budget", "planned"), S.STALE, A.RAISE),
    (S.STALE, E.PLAN_REFUSED, ("planned",), S.STALE, A.RAISE),
    (S.STALE, E.PLAN_REFUSED, ("borrowed",), S.NEW, A.RAISE),
    (S.STALE, E.PLAN_REFUSED, (), S.REFUSED, A.RAISE),
    (S.PLANNED, E.BETTER_FOUND, (), S.PLANNED, A.RUN),
    # a planned step has ended within its budget
    (S.PLANNED, E.ENDED, ("departed", "unrecorded", "accepted"), S.PLANNED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("longer", "departed", "profiles left", "differs"), S.DOUBTED, A.DOUBT),
    (S.PLANNED, E.ENDED, ("longer", "departed"), S.PLANNED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("tried", "departed", "profiles left"), S.DOUBTED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("tried", "departed"), S.PLANNED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("tried", "profiles left"), S.PLANNED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("departed", "profiles left"), S.PLANNED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("unrecorded", "profiles left", "late buffer"), S.PLANNED, A.NOTHING),
    (S.VARYING, E.ENDED, ("tried", "departed", "profiles left"), S.VARYING, A.NOTHING),
    (S.PLANNED, E.ENDED, ("differs",), S.VARYING, A.NOTHING),
    (S.VARYING, E.ENDED, ("differs",), S.VARYING, A.NOTHING),
    (S.VARYING, E.ENDED, ("longer", "profiles left"), S.DOUBTED, A.DOUBT),
    # or above it
    (S.PLANNED, E.ENDED, ("accepted", "above", "departed", "profiles left"), S.PLANNED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("second derivatives", "above", "late buffer"), S.PLANNED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("second derivatives", "accepted", "differs"), S.VARYING, A.NOTHING),
    (S.STALE, E.ENDED, ("replaced", "above"), S.STALE, A.NOTHING),
    (S.PLANNED, E.ENDED, ("replaced", "differs"), S.PLANNED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("above", "unrecorded", "profiles left"), S.DOUBTED, A.DOUBT),
    (S.VARYING, E.ENDED, ("above", "unrecorded", "profiles left"), S.DOUBTED, A.DOUBT),
    (S.PLANNED, E.ENDED, ("above", "departed", "profiles left", "late buffer"), S.DOUBTED, A.DOUBT),
    (S.STALE, E.ENDED, ("above", "departed", "profiles left", "differs"), S.DOUBTED, A.DOUBT),
    (S.PLANNED, E.ENDED, ("above", "departed", "late buffer"), S.PLANNED, A.WAIT),
    (S.PLANNED, E.ENDED, ("above", "more backwards", "late buffer"), S.PLANNED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("more backwards", "differs"), S.VARYING, A.NOTHING),
    (S.PLANNED, E.ENDED, ("above", "unrecorded"), S.PLANNED, A.LEAVE_MARGIN),
    (S.PLANNED, E.ENDED, ("above",), S.PLANNED, A.LEAVE_MARGIN),
    (S.PLANNED, E.ENDED, ("above", "profiles left"), S.PLANNED, A.LEAVE_MARGIN),
    (S.PLANNED, E.ENDED, ("above", "longer", "departed", "differs", "profiles left"), S.VARYING, A.NOTHING),
    (S.VARYING, E.ENDED, ("above", "departed", "differs", "longer"), S.VARYING, A.LEAVE_RESERVE),
    (S.VARYING, E.ENDED, ("above", "departed", "profiles left", "late buffer"), S.VARYING, A.LEAVE_RESERVE),
    (S.VARYING, E.ENDED, ("above", "longer", "profiles left"), S.DOUBTED, A.DOUBT),
    (S.DOUBTED, E.RETAINED, (), S.DOUBTED, A.TAKE_BACK),
    # the end
    (S.PLANNED, E.REMOVED, (), S.GONE, A.CLOSE),
    (S.GONE, E.PROFILED, (), S.GONE, A.NOTHING),
    (S.GONE, E.ENDED, ("above",), S.GONE, A.NOTHING),
]

SAID: list[tuple[State, tuple[Fact, ...], str]] = [
    (S.GONE, ("above", "departed", "profiles left"), "nothing follows"),
    (S.STALE, ("replaced", "above", "second derivatives"), "a newer plan"),
    (S.PLANNED, ("second derivatives", "accepted"), "create_graph=True"),
    (S.PLANNED, ("accepted", "unrecorded", "departed", "profiles left"), "only a larger budget"),
    (S.VARYING, ("unrecorded", "profiles left"), "its operations went unseen"),
    (S.VARYING, ("longer", "departed", "profiles left"), "other operations than the step"),
    (S.VARYING, ("departed", "profiles left"), "later steps leave"),
    (S.PLANNED, ("longer", "profiles left"), "plans again with that much less"),
    (S.VARYING, ("longer", "departed", "differs", "late buffer"), "later steps leave"),
    (S.PLANNED, ("differs", "departed", "longer", "profiles left"), "other operations each time"),
    (S.DOUBTED, ("differs", "departed", "profiles left", "more backwards"), "lowtide profiles the next"),
    (S.PLANNED, ("departed", "more backwards", "late buffer"), "retain_graph=True"),
    (S.PLANNED, ("late buffer",), "a thread of the process group"),
    (S.DOUBTED, ("differs", "unrecorded"), "plans again with that much less"),
]


@pytest.mark.parametrize(("state", "evidence", "facts", "then", "action"), CASES)
def test_what_follows(
    state: State, evidence: Evidence, facts: tuple[Fact, ...], then: State, action: Action
) -> None:
    assert TABLE.transition(state, evidence, facts) == (then, action)


@pytest.mark.parametrize("less", thinned(TABLE.rows))
def test_nothing_of_the_table_can_be_missed(less: Any) -> None:
    table = replace(TABLE, rows=less)
    assert any(table.transition(*case[:3]) != case[3:] for case in CASES)


@pytest.mark.parametrize(("state", "facts", "words"), SAID)
def test_why_a_step_took_more(state: State, facts: tuple[Fact, ...], words: str) -> None:
    assert words in why(Ending(state, frozenset(facts), A.NOTHING))


@pytest.mark.parametrize("less", thinned(WHY))
def test_nothing_of_the_words_can_be_missed(less: list[Why]) -> None:
    said = ((why(Ending(state, frozenset(facts), A.NOTHING), less), words) for state, facts, words in SAID)
    assert any(words not in text for text, words in said)


def test_every_word_of_the_table_is_used() -> None:
    assert {fact for row in (*TABLE.rows, *WHY) for fact in row.facts} == set(get_args(Fact))
    assert {row.evidence for row in TABLE.rows} == set(Evidence)
    assert {row.action for row in TABLE.rows} | {A.NOTHING} == set(Action)


def test_only_the_state_machine_assigns_the_fields_of_an_entry() -> None:
    records = {"room": Room, "traits": Traits, "seen": Seen}
    names = {field.name for record in (Entry, *records.values()) for field in fields(record)}
    others = {field.name for field in fields(Planned)}  # of an entry only where it is called one
    package = Path(lowtide.__file__).parent
    found = []
    for file in (package / "run" / "limit").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found += [
                file.name
                for target in targets
                for part in ast.walk(target or ast.Pass())
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                if part.attr in names and (name := _called(part.value)) not in ("self", "limiter")
                if part.attr not in others or name in ("entry", "sibling", *records)
            ]
    assert set(found) == {"machine.py"}
    written = ast.walk(ast.parse((package / "run" / "limit" / "entry.py").read_text()))
    own = {one.name: one for one in written if isinstance(one, ast.ClassDef)}
    for record in (Entry, *records.values()):
        parts = [part for part in ast.walk(own[record.__name__]) if isinstance(part, ast.Attribute)]
        assert not [part.attr for part in parts if isinstance(part.ctx, ast.Store)], "to ask changes nothing"


def _called(part: ast.expr) -> str:
    """The last name of what an attribute is assigned to."""
    return part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")


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


def ran(entry: Entry, took: int | None, **more: Any) -> Any:
    """What a planned step shows when it has ended."""
    director = more.get("director")
    step = {"planned": entry.planned, "director": None, "measured_bytes": took, "margin_bytes": 0}
    step |= {"extra": director.extra if director is not None else 0, "ran": None, "can_evict": True}
    step |= {"departed": director is not None and director.departed, "tried": False}
    return SimpleNamespace(**{**step, "backwards": 1, "makes_graph": False, **more})


def followed(extra: int = 0, departed: bool = False) -> Any:
    return SimpleNamespace(extra=extra, departed=departed or extra > 0)


def test_what_is_not_measured_says_nothing_but_the_operations_that_ran() -> None:
    entry = planned_entry()
    assert machine.on_ended(entry, ran(entry, None, director=followed())).action is A.NOTHING
    assert not entry.seen.may_differ and not entry.wants_profile
    assert machine.on_ended(entry, ran(entry, None, director=followed(extra=1))).action is A.DOUBT
    assert entry.seen.may_differ and entry.state is S.DOUBTED


def test_a_step_that_took_more_is_planned_with_that_much_less() -> None:
    entry = planned_entry()
    step = ran(entry, OVER)
    assert machine.on_ended(entry, step).action is A.LEAVE_MARGIN
    assert 0 < entry.room.margin_bytes == step.margin_bytes <= OVER - LIMIT + 8192
    assert machine.on_called(entry, version=0) is A.PLAN
    entry = planned_entry()
    step = ran(entry, OVER)
    for step.measured_bytes in (OVER, OVER + 5):
        machine.on_ended(entry, step)
        assert entry.room.margin_bytes == step.margin_bytes, "of a step with several backwards each teaches"
    step.backwards = 2
    assert "retain_graph" in why(machine.on_ended(entry, step))
    assert (entry.room.margin_bytes, step.margin_bytes) == (0, 0), "only a kept graph took more"
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
        assert (entry.room.margin_bytes == 0) == late
        assert machine.on_ended(entry, ran(entry, LIMIT)).action is A.NOTHING
        assert (machine.on_ended(entry, ran(entry, took)).action is A.WAIT) == late
        assert machine.on_ended(entry, ran(entry, took)).action is A.LEAVE_MARGIN and entry.room.margin_bytes


@pytest.mark.parametrize("director", [None, followed(departed=True)])
def test_an_entry_that_was_profiled_often_is_planned_with_less(director: Any) -> None:
    plan = FITS if director is None else PLAN
    entry = planned_entry(plan)
    assert machine.on_ended(entry, ran(entry, OVER, director=director)).action is A.DOUBT
    assert entry.wants_profile and entry.seen.may_differ and entry.room.margin_bytes == 0
    entry = planned_entry(plan, profiles=8)
    assert machine.on_ended(entry, ran(entry, OVER, director=director)).action is A.LEAVE_MARGIN


def test_a_plan_that_stays_accepts_what_its_steps_take() -> None:
    entry = planned_entry()
    machine.on_ended(entry, ran(entry, OVER))
    assert machine.on_called(entry, version=0) is A.PLAN
    assert machine.on_plan_refused(entry, version=0) is A.ACCEPT
    assert machine.on_called(entry, version=0) is A.RUN
    assert "only a larger budget" in why(machine.on_ended(entry, ran(entry, OVER)))


def test_another_budget_is_refused_only_where_no_step_had_taken_more() -> None:
    entry = planned_entry()
    machine.on_ended(entry, ran(entry, OVER))
    assert machine.on_called(entry, version=1) is A.PLAN
    assert machine.on_plan_refused(entry, version=1) is A.PLAN and entry.room.margin_bytes == 0
    assert machine.on_plan_refused(entry, version=1) is A.RAISE


def test_what_a_graph_does_not_show_is_left_free_when_the_margin_goes() -> None:
    entry = Entry(key())
    machine.on_profiled(entry, GRAPH, verified=True, checkpoints=2)
    unseen = entry.room.unseen_bytes
    assert unseen == 2 * torch.default_generator.get_state().nbytes
    machine.on_plan_made(entry, Planned(entry.key, GRAPH, GRAPH, PLAN), version=0)
    machine.on_ended(entry, ran(entry, OVER))
    machine.on_called(entry, version=1)
    assert machine.on_plan_refused(entry, version=1) is A.PLAN
    assert (entry.room.margin_bytes, entry.room.unseen_bytes) == (0, unseen)


def test_a_step_whose_plan_was_replaced_teaches_nothing() -> None:
    entry = planned_entry()
    step = ran(entry, OVER)
    machine.on_better_found(entry, Planned(entry.key, GRAPH, GRAPH, PLAN))
    assert "a newer plan" in why(machine.on_ended(entry, step))
    assert entry.room.margin_bytes == 0


def test_the_longest_profiled_step_is_planned_for() -> None:
    entry = planned_entry()
    machine.on_ended(entry, ran(entry, OVER, director=followed(extra=9)))
    assert machine.on_profiled(entry, graph(3), verified=True, backwards=2) is A.PLAN
    machine.on_plan_made(entry, Planned(entry.key, graph(3), graph(3), PLAN), version=0)
    machine.on_ended(entry, ran(entry, OVER, director=followed(extra=9), can_evict=False))
    assert machine.on_profiled(entry, graph(2), verified=True) is A.NOTHING
    assert entry.graph == graph(3) and entry.state is S.PLANNED and entry.traits.backwards == 2


def test_steps_that_differ_evict_on_demand_and_learn_what_to_leave_free() -> None:
    entry = planned_entry()
    assert machine.on_ended(entry, ran(entry, LIMIT // 2, ran=(0, 9))).action is A.NOTHING
    assert machine.on_ended(entry, ran(entry, LIMIT // 2, ran=(2, 7), can_evict=False)).action is A.NOTHING
    assert machine.on_ended(entry, ran(entry, OVER, ran=(2, 7))).action is A.LEAVE_MARGIN, "the same again"
    assert "other operations each time" in why(machine.on_ended(entry, ran(entry, OVER, ran=(0, 8))))
    assert entry.state is S.VARYING and machine.on_called(entry, version=0) is A.RUN
    assert machine.on_ended(entry, ran(entry, LIMIT + 4096, ran=(0, 8))).action is A.LEAVE_RESERVE
    assert 4096 < entry.room.reserve_bytes < 8192
    assert machine.on_ended(entry, ran(entry, 9 * LIMIT, ran=(0, 8))).action is A.LEAVE_RESERVE
    assert entry.room.reserve_bytes == LIMIT // 4, "others made it larger"
    assert machine.on_called(entry, version=1) is A.PLAN
    assert machine.on_plan_made(entry, Planned(entry.key, GRAPH, GRAPH, PLAN), version=1) is A.RUN
    assert entry.state is S.VARYING and entry.room.margin_bytes == 0
    adds = Entry(key(gradients=1))
    machine.borrow(adds, entry)
    assert adds.traits.differed and adds.room.reserve_bytes == entry.room.reserve_bytes


def test_varying_steps_whose_longest_fits_no_plan_are_planned_for_once() -> None:
    """The plan in force counted as made for another margin: each later step searched again."""
    entry = planned_entry()
    machine.on_ended(entry, ran(entry, OVER, ran=(0, 9)))
    assert machine.on_called(entry, version=0) is A.PLAN and entry.room.margin_bytes
    machine.on_plan_made(entry, Planned(entry.key, GRAPH, GRAPH, PLAN), version=0)
    step = ran(entry, LIMIT // 2, director=followed(extra=9), ran=(0, 9))
    assert machine.on_ended(entry, step).action is A.DOUBT
    assert machine.on_profiled(entry, graph(3), verified=True, ran=(2, 9)) is A.PLAN
    assert machine.on_plan_refused(entry, version=0) is A.RUN and entry.state is S.VARYING
    assert machine.on_called(entry, version=0) is A.RUN


def test_a_kept_graph_takes_back_no_more_than_is_left_free() -> None:
    """What a plan had gone without meanwhile was taken back once more: the margin was negative."""
    entry = planned_entry()
    step = ran(entry, OVER)
    machine.on_ended(entry, step)
    machine.on_called(entry, version=0)
    assert machine.on_plan_refused(entry, version=0) is A.ACCEPT and entry.room.margin_bytes == 0
    step.backwards = 2
    machine.on_ended(entry, step)
    assert entry.room.margin_bytes == 0 and machine.on_called(entry, version=0) is A.RUN


def test_a_first_step_that_differs_has_the_next_one_profiled_which_says_whether_steps_vary() -> None:
    for second, state in (((0, 8), S.VARYING), ((0, 9), S.PLANNED)):
        for operations in (0, 3):  # no more than the first had, or more
            entry = planned_entry()
            step = ran(entry, LIMIT // 2, ran=(0, 9), tried=True, departed=True)
            assert machine.on_ended(entry, step).action is A.NOTHING and entry.state is S.DOUBTED
            action = machine.on_profiled(entry, graph(operations), verified=True, ran=second)
            if action is A.PLAN:
                planned = Planned(entry.key, graph(operations), graph(operations), PLAN)
                assert machine.on_plan_made(entry, planned, version=0) is A.RUN
            assert entry.state is state and entry.seen.ran == second


def test_a_sibling_begins_with_what_is_known() -> None:
    entry = planned_entry()
    machine.on_ended(entry, ran(entry, OVER))
    adds = Entry(key(gradients=1))
    machine.borrow(adds, entry)
    assert adds.room.margin_bytes == entry.room.margin_bytes
    assert machine.on_called(adds, version=0) is A.PLAN
    assert machine.on_plan_refused(adds, version=0) is A.PLAN
    assert machine.on_plan_refused(adds, version=0) is A.RAISE and adds.state is S.NEW


# ---- the words ------------------------------------------------------------------------------------


LESS = Ending(S.PLANNED, frozenset({"above"}), A.LEAVE_MARGIN)
ACCEPTED = Ending(S.PLANNED, frozenset({"above", "accepted"}), A.NOTHING)
BACKWARDS = Ending(S.PLANNED, frozenset({"above", "more backwards"}), A.NOTHING)


class Ended(PlannedStep):
    """A step under a plan that took what it is given, without a watch."""

    def __init__(self, plan: Plan, took: int | None) -> None:
        self.planned, self.took, self._warned = Planned(key(), GRAPH, GRAPH, plan), took, None
        self._peak = None

    @property
    def measured_bytes(self) -> int | None:
        return self.took


def test_each_step_above_its_budget_is_told_the_first_ones_at_length() -> None:
    overruns = Overruns()
    texts = [Ended(PLAN, OVER).overrun_text(overruns, ending) for ending in (LESS, ACCEPTED) * 5]
    assert all("1,048,576 bytes above the budget of 1 MiB" in text for text in texts)
    assert [" so far)" in text for text in texts] == [False] * 6 + [True] * 4
    assert "10 of this limit's steps" in texts[-1]
    assert Ended(PLAN, LIMIT).overrun_text(overruns, LESS) == ""
    assert Ended(PLAN, None).overrun_text(overruns, LESS) == "", "what is not measured"


def test_the_backwards_of_one_step_count_once_and_are_told_as_they_take_more() -> None:
    overruns, step = Overruns(), Ended(PLAN, OVER)
    assert step.overrun_text(overruns, LESS)
    assert not step.overrun_text(overruns, LESS), "the second backward took no more"
    step.took = OVER + 1
    assert step.overrun_text(overruns, BACKWARDS)
    assert overruns.steps.total() == 1


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
