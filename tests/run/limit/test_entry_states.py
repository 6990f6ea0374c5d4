"""The table of cached plans: what follows from each piece of evidence, and what users are told."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
from thinned_tables import follows, thinned

from lowtide.run.limit import entry_states
from lowtide.run.limit.entry_states import TABLE, UNPLANNED, Action, Evidence, Fact, State

S, E, A = State, Evidence, Action

CASES: list[tuple[State, Evidence, tuple[Fact, ...], State, Action]] = [
    # a step begins
    (S.NEW, E.CALLED, (), S.NEW, A.PROFILE),
    (S.NEW, E.CALLED, ("graph known",), S.STALE, A.PLAN),
    (S.REFUSED, E.CALLED, ("graph known",), S.REFUSED, A.PROFILE),
    (S.REFUSED, E.CALLED, ("graph known", "other budget"), S.STALE, A.PLAN),
    (S.DOUBTED, E.CALLED, ("outdated",), S.DOUBTED, A.PROFILE),
    (S.NEW, E.CALLED, ("shared",), S.NEW, A.PROFILE_ASIDE),
    (S.NEW, E.CALLED, ("backward unseen",), S.NEW, A.PROFILE_ASIDE),
    (S.NEW, E.CALLED, ("prepared",), S.NEW, A.PROFILE_ASIDE),
    (S.REFUSED, E.CALLED, ("prepared",), S.REFUSED, A.PROFILE_ASIDE),
    (S.DOUBTED, E.CALLED, ("prepared",), S.DOUBTED, A.PROFILE_ASIDE),
    (S.STALE, E.CALLED, ("prepared",), S.STALE, A.PLAN),
    (S.REFUSED, E.CALLED, ("shared",), S.REFUSED, A.PROFILE_ASIDE),
    (S.REFUSED, E.CALLED, ("backward unseen",), S.REFUSED, A.PROFILE_ASIDE),
    (S.REFUSED, E.CALLED, ("shared", "other budget"), S.STALE, A.PLAN),
    (S.DOUBTED, E.CALLED, ("shared",), S.DOUBTED, A.PROFILE_ASIDE),
    (S.DOUBTED, E.CALLED, ("backward unseen",), S.DOUBTED, A.PROFILE_ASIDE),
    (S.PLANNED, E.CALLED, ("shared", "backward unseen"), S.PLANNED, A.RUN),
    (S.STALE, E.CALLED, (), S.STALE, A.PLAN),
    (S.PLANNED, E.CALLED, (), S.PLANNED, A.RUN),
    (S.PLANNED, E.CALLED, ("outdated",), S.STALE, A.PLAN),
    (S.VARYING, E.CALLED, (), S.VARYING, A.RUN),
    (S.VARYING, E.CALLED, ("outdated",), S.STALE, A.PLAN),
    (S.NEW, E.NO_LOSS, ("shared",), S.NEW, A.PROFILE),
    (S.DOUBTED, E.NO_LOSS, (), S.DOUBTED, A.RAISE),
    # ranks that share the plan
    (S.PLANNED, E.PEERS, ("peer profiles", "peer outdated"), S.DOUBTED, A.NOTHING),
    (S.PLANNED, E.PEERS, ("peer outdated",), S.STALE, A.NOTHING),
    (S.STALE, E.PEERS, ("peer profiles",), S.DOUBTED, A.NOTHING),  # no plan fitted here
    (S.NEW, E.PEERS, ("peer profiles",), S.NEW, A.NOTHING),
    (S.PLANNED, E.PEERS, (), S.PLANNED, A.NOTHING),
    # a step was profiled
    (S.NEW, E.PROFILED, ("unverified",), S.NEW, A.PROFILE),
    (S.DOUBTED, E.PROFILED, ("planned", "shorter"), S.PLANNED, A.NOTHING),
    (S.DOUBTED, E.PROFILED, ("planned", "shorter", "differed"), S.VARYING, A.VARY),
    (S.DOUBTED, E.PROFILED, ("planned",), S.STALE, A.PLAN),
    (S.DOUBTED, E.PROFILED, ("planned", "differed"), S.STALE, A.PLAN),
    (S.REFUSED, E.PROFILED, ("shorter", "differed"), S.STALE, A.PLAN),
    (S.REFUSED, E.PROFILED, ("shorter",), S.STALE, A.PLAN),
    (S.NEW, E.PROFILE_ENDED, (), S.NEW, A.NOTHING),
    (S.NEW, E.PROFILE_ENDED, ("backward unseen",), S.NEW, A.DISCARD),
    (S.DOUBTED, E.PROFILE_ENDED, ("shared",), S.DOUBTED, A.DISCARD),
    # a plan
    (S.STALE, E.PLAN_MADE, (), S.PLANNED, A.RUN),
    (S.STALE, E.PLAN_MADE, ("differed",), S.VARYING, A.VARY),
    (S.STALE, E.PLAN_REFUSED, ("differed", "planned"), S.STALE, A.RAISE),
    (S.STALE, E.PLAN_REFUSED, ("differed", "planned", "same budget"), S.VARYING, A.VARY),
    (S.STALE, E.PLAN_REFUSED, ("margin", "current plan", "planned"), S.PLANNED, A.ACCEPT),
    (S.STALE, E.PLAN_REFUSED, ("margin", "planned"), S.STALE, A.PLAN),
    (S.STALE, E.PLAN_REFUSED, ("current plan", "same budget", "planned"), S.STALE, A.RAISE),
    (S.STALE, E.PLAN_REFUSED, ("planned",), S.STALE, A.RAISE),
    (S.STALE, E.PLAN_REFUSED, ("peers wait", "planned"), S.STALE, A.RAISE),
    (S.STALE, E.PLAN_REFUSED, ("peers wait", "margin"), S.STALE, A.PLAN),
    (S.STALE, E.PLAN_REFUSED, ("peers wait",), S.STALE, A.PLAN_SMALLEST),
    (S.STALE, E.PLAN_REFUSED, (), S.REFUSED, A.RAISE),
    # the forward of a planned step begins
    (S.VARYING, E.FORWARD_BEGINS, ("can evict",), S.VARYING, A.EVICT),
    (S.VARYING, E.FORWARD_BEGINS, ("can evict", "untried", "may differ"), S.VARYING, A.EVICT),
    (S.VARYING, E.FORWARD_BEGINS, ("untried", "may differ", "unkeyed arguments"), S.VARYING, A.RUN),
    (S.PLANNED, E.FORWARD_BEGINS, ("can evict", "untried", "may differ"), S.PLANNED, A.TRY),
    (S.PLANNED, E.FORWARD_BEGINS, ("can evict", "untried", "unkeyed arguments"), S.PLANNED, A.TRY),
    (S.DOUBTED, E.FORWARD_BEGINS, ("can evict", "untried", "may differ"), S.DOUBTED, A.RUN),
    (S.DOUBTED, E.FORWARD_BEGINS, ("can evict", "untried", "unkeyed arguments"), S.DOUBTED, A.RUN),
    (S.PLANNED, E.FORWARD_BEGINS, ("untried", "may differ", "unkeyed arguments"), S.PLANNED, A.RUN),
    (S.PLANNED, E.FORWARD_BEGINS, ("can evict", "may differ", "unkeyed arguments"), S.PLANNED, A.RUN),
    (S.PLANNED, E.FORWARD_BEGINS, ("can evict", "untried"), S.PLANNED, A.RUN),
    (S.PLANNED, E.FORWARD_BEGINS, ("changes nothing", "may differ"), S.PLANNED, A.RUN),
    (S.PLANNED, E.FORWARD_BEGINS, ("changes nothing", "unwatched", "can evict"), S.PLANNED, A.PASS),
    (S.PLANNED, E.FORWARD_BEGINS, ("unwatched",), S.PLANNED, A.RUN),
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
    (S.PLANNED, E.ENDED, ("differs",), S.VARYING, A.VARY),
    (S.VARYING, E.ENDED, ("differs",), S.VARYING, A.NOTHING),
    (S.VARYING, E.ENDED, ("longer", "profiles left"), S.DOUBTED, A.DOUBT),
    # or above it
    (S.PLANNED, E.ENDED, ("accepted", "above", "departed", "profiles left"), S.PLANNED, A.NOTHING),
    (S.PLANNED, E.ENDED, ("second derivatives", "above", "late buffer"), S.PLANNED, A.LEAVE_NOTHING),
    (S.PLANNED, E.ENDED, ("second derivatives", "accepted", "differs"), S.VARYING, A.VARY),
    (S.STALE, E.ENDED, ("replaced", "above"), S.STALE, A.IGNORE),
    (S.PLANNED, E.ENDED, ("replaced", "differs"), S.PLANNED, A.IGNORE),
    (S.PLANNED, E.ENDED, ("above", "unrecorded", "profiles left"), S.DOUBTED, A.DOUBT),
    (S.VARYING, E.ENDED, ("above", "unrecorded", "profiles left"), S.DOUBTED, A.DOUBT),
    (S.PLANNED, E.ENDED, ("above", "departed", "profiles left", "late buffer"), S.DOUBTED, A.DOUBT),
    (S.STALE, E.ENDED, ("above", "departed", "profiles left", "differs"), S.DOUBTED, A.DOUBT),
    (S.PLANNED, E.ENDED, ("above", "departed", "late buffer"), S.PLANNED, A.WAIT),
    (S.PLANNED, E.ENDED, ("above", "more backwards", "late buffer"), S.PLANNED, A.LEAVE_NOTHING),
    (S.PLANNED, E.ENDED, ("more backwards", "differs"), S.VARYING, A.VARY),
    (S.PLANNED, E.ENDED, ("above", "unrecorded"), S.PLANNED, A.LEAVE_MARGIN),
    (S.PLANNED, E.ENDED, ("above",), S.PLANNED, A.LEAVE_MARGIN),
    (S.PLANNED, E.ENDED, ("above", "profiles left"), S.PLANNED, A.LEAVE_MARGIN),
    (S.PLANNED, E.ENDED, ("above", "longer", "departed", "differs", "profiles left"), S.VARYING, A.VARY),
    (S.VARYING, E.ENDED, ("above", "departed", "differs", "longer"), S.VARYING, A.LEAVE_RESERVE),
    (S.VARYING, E.ENDED, ("above", "departed", "profiles left", "late buffer"), S.VARYING, A.LEAVE_RESERVE),
    (S.VARYING, E.ENDED, ("above", "longer", "profiles left"), S.DOUBTED, A.DOUBT),
    # the end
    (S.PLANNED, E.REMOVED, (), S.GONE, A.NOTHING),
    (S.GONE, E.PROFILED, (), S.GONE, A.NOTHING),
    (S.GONE, E.ENDED, ("above",), S.GONE, A.IGNORE),
]

SAID: list[tuple[State, tuple[Fact, ...], str]] = [
    (S.GONE, ("above", "departed", "profiles left"), "nothing follows"),
    (S.STALE, ("replaced", "above", "second derivatives"), "a newer plan"),
    (S.PLANNED, ("second derivatives", "accepted"), "create_graph=True"),
    (S.PLANNED, ("accepted", "unrecorded", "departed", "profiles left"), "only a larger budget"),
    (S.VARYING, ("unrecorded", "profiles left"), "its operations went unseen"),
    (S.VARYING, ("longer", "departed", "profiles left"), "other operations than the step"),
    (S.VARYING, ("departed", "profiles left"), "later steps leave"),
    (S.PLANNED, ("longer", "departed"), "plans again with that much less"),
    (S.PLANNED, ("longer", "departed", "profiles left"), "lowtide profiles the next"),
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
    assert follows(TABLE, state, evidence, facts) == (then, action)


@pytest.mark.parametrize("less", thinned(TABLE.rows))
def test_nothing_of_the_table_can_be_missed(less: Any) -> None:
    table = replace(TABLE, rows=less)
    assert any(follows(table, *case[:3]) != case[3:] for case in CASES)


@pytest.mark.parametrize(("state", "facts", "words"), SAID)
def test_why_a_step_took_more(state: State, facts: tuple[Fact, ...], words: str) -> None:
    assert words in TABLE.row(state, E.ENDED, ("above", *facts)).warning


def test_every_step_above_its_budget_is_said_something_of() -> None:
    assert all(row.warning for row in TABLE.rows if row.evidence is E.ENDED and "above" in row.facts)
    texts = [row.warning for row in TABLE.rows if row.warning]
    said = [TABLE.row(state, E.ENDED, ("above", *facts)).warning for state, facts, _ in SAID]
    assert set(texts) == set(said)


ARROWS = {
    S.NEW: {S.STALE, S.GONE},
    S.STALE: {S.PLANNED, S.VARYING, S.REFUSED, S.DOUBTED, S.GONE},
    S.REFUSED: {S.STALE, S.GONE},
    S.PLANNED: {S.STALE, S.VARYING, S.DOUBTED, S.GONE},
    S.VARYING: {S.STALE, S.DOUBTED, S.GONE},
    S.DOUBTED: {S.STALE, S.PLANNED, S.VARYING, S.GONE},
}
"""The arrows of the picture in docs/design.md."""

ANY = {
    E.PROFILED: UNPLANNED,
    E.ENDED: (S.STALE, S.PLANNED, S.VARYING),
    E.REMOVED: tuple(State),
}
"""The states in which such evidence comes, for rows that name none."""


def test_the_picture_of_the_design_has_an_arrow_for_each_change_of_state() -> None:
    found: dict[State, set[State]] = {}
    for row in TABLE.rows:
        has_plan = (S.DOUBTED,) if "planned" in row.facts and row.evidence is E.PROFILED else None
        for state in row.states or has_plan or ANY.get(row.evidence, ()):
            if row.then not in (None, state):
                found.setdefault(state, set()).add(row.then)
    assert found == ARROWS
    assert all(then in ARROWS[state] for state, _, _, then, _ in CASES if then is not state)


def test_the_picture_in_the_text_of_the_table_has_the_same_arrows() -> None:
    (picture,) = re.findall(r"```text\n(.*?)```", entry_states.__doc__ or "", re.DOTALL)
    drawn: dict[State, set[State]] = {}
    for line in picture.splitlines():
        arrows = re.split(r"\s{2,}", line.strip())[0].split(" --> ")
        states = [
            list(ARROWS) if names == "any" else [S[name] for name in names.split(", ")] for names in arrows
        ]
        for before, after in pairwise(states):
            for state in before:
                drawn.setdefault(state, set()).update(after)
    assert drawn == ARROWS


def test_a_forward_that_begins_changes_no_state() -> None:
    rows = [row for row in TABLE.rows if row.evidence is E.FORWARD_BEGINS]
    assert rows and all(row.then is None for row in rows)


def test_the_text_of_the_table_says_who_carries_out_each_action() -> None:
    rows = re.findall(r"^\| ([A-Z_]+(?:, [A-Z_]+)*)", entry_states.__doc__ or "", re.MULTILINE)
    assert {name for row in rows for name in row.split(", ")} == {action.name for action in A} - {"NOTHING"}


def test_every_word_of_the_table_is_used() -> None:
    assert {fact for row in TABLE.rows for fact in row.facts} == set(get_args(Fact))
    assert {row.evidence for row in TABLE.rows} == set(Evidence)
    assert {row.action for row in TABLE.rows} | {A.NOTHING} == set(Action)
