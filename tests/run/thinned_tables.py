"""Tables of rows, with less in them: a test of a table fails for each of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


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
