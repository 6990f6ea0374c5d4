"""Tables of rows: what follows by them, and tables with less in them, for each of which a test fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def follows(table: Any, state: Any, evidence: Any, facts: Sequence[str] = ()) -> tuple[Any, Any]:
    """The next state and the action, by the row that fits."""
    row = table.row(state, evidence, facts)
    return row.then or state, row.action


def thinned(table: Sequence[Any]) -> list[Any]:
    """The table without each of its rows, and without each fact, and each of several states, of a row: as
    parameters of a test, named by what is gone.
    """
    tables = []
    for at, row in enumerate(table):
        less: dict[str, list[Any]] = {"all": []}
        for fact in row.facts:
            less[fact] = [row._replace(facts=tuple(one for one in row.facts if one != fact))]
        for state in row.states if len(row.states) > 1 else ():
            less[state.name] = [row._replace(states=tuple(one for one in row.states if one is not state))]
        for what, rows in less.items():
            rest = [*table[:at], *rows, *table[at + 1 :]]
            tables.append(pytest.param(rest, id=f"row {at + 1}: {what}"))
    return tables
