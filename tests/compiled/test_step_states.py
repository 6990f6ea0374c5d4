"""The state machine of a step of compiled graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from thinned_tables import follows, thinned

from lowtide.compiled.step_states import TABLE, Action, Evidence, Fact, State

S, E, A = State, Evidence, Action

CASES: list[tuple[State, Evidence, tuple[Fact, ...], State, Action]] = [
    # a forward begins
    (S.RECORDED, E.FORWARD_BEGINS, ("waits",), S.RECORDED, A.GO_ON),
    (S.RECORDED, E.FORWARD_BEGINS, (), S.RECORDED, A.NOTHING),
    (S.RUNS, E.FORWARD_BEGINS, ("waits", "unfinished"), S.RUNS, A.GO_ON),
    (S.RUNS, E.FORWARD_BEGINS, ("waits",), S.RUNS, A.NOTHING),
    (S.RUNS, E.FORWARD_BEGINS, ("unfinished",), S.RUNS, A.NOTHING),
    (S.STRAYED, E.FORWARD_BEGINS, ("waits", "unfinished"), S.STRAYED, A.NOTHING),
    (S.IDLE, E.STEP_BEGINS, (), S.RUNS, A.NOTHING),
    (S.IDLE, E.STEP_BEGINS, ("wanted",), S.RECORDED, A.RECORD),
    (S.IDLE, E.STEP_BEGINS, ("wanted", "unmeasurable"), S.RUNS, A.NOTHING),
    # a graph is called
    (S.RUNS, E.GRAPH_CALLED, ("planned for",), S.RUNS, A.RUN_PLANNED),
    (S.RUNS, E.GRAPH_CALLED, ("planned for", "unmeasurable"), S.RUNS, A.RUN_PLANNED),
    (S.RUNS, E.GRAPH_CALLED, (), S.STRAYED, A.MISS),
    (S.RUNS, E.GRAPH_CALLED, ("unmeasurable",), S.STRAYED, A.WARN),
    (S.STRAYED, E.GRAPH_CALLED, ("planned for",), S.STRAYED, A.RUN_SMALLEST),
    (S.RECORDED, E.GRAPH_CALLED, ("planned for",), S.RECORDED, A.RUN_SMALLEST),
    # a step ends
    (S.RECORDED, E.FORWARD_ENDED, (), S.RECORDED, A.NOTHING),
    (S.RECORDED, E.FORWARD_ENDED, ("uncalled",), S.IDLE, A.DROP),
    (S.RUNS, E.FORWARD_ENDED, ("uncalled",), S.RUNS, A.NOTHING),
    (S.RUNS, E.BACKWARD_BEGINS, ("more backwards",), S.RUNS, A.RECORD_NEXT),
    (S.STRAYED, E.BACKWARD_BEGINS, ("more backwards",), S.STRAYED, A.RECORD_NEXT),
    (S.IDLE, E.BACKWARD_BEGINS, ("more backwards",), S.IDLE, A.RECORD_NEXT),  # its first was planned for
    (S.RUNS, E.BACKWARD_BEGINS, (), S.RUNS, A.NOTHING),
    (S.RECORDED, E.BACKWARD_BEGINS, ("more backwards",), S.RECORDED, A.NOTHING),
    (S.RECORDED, E.BACKWARD_ENDED, (), S.IDLE, A.PLAN),
    (S.RUNS, E.BACKWARD_ENDED, (), S.RUNS, A.NOTHING),
    (S.RECORDED, E.OVER, ("backward seen",), S.IDLE, A.PLAN),
    (S.RECORDED, E.OVER, (), S.IDLE, A.DOUBT),
    (S.STRAYED, E.OVER, ("backward seen",), S.IDLE, A.NOTHING),
    (S.RECORDED, E.FAILED, (), S.IDLE, A.DROP),
    (S.RUNS, E.FAILED, (), S.IDLE, A.NOTHING),
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
