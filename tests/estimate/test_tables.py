"""Tables on narrow terminals: whole, in parts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from lowtide.estimate.tables import Whole


def shown(what: object, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(what)
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 45, 60, 80, 200])
def test_a_table_is_whole_at_any_width(width: int) -> None:
    table = Table(title="sizes")
    for name in ["row", *(f"column {k}" for k in range(9))]:
        table.add_column(name, no_wrap=True)
    for row in range(3):
        table.add_row(str(row), *(f"cell {row} {k}" for k in range(9)))
    text = shown(Whole(table), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert all(f"cell {row} {k}" in text for row in range(3) for k in range(9))
    assert text.count("sizes") == 1 and (text.count("row") == 1) == (width == 200)
