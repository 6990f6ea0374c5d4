"""Tables of state machines: the first row that fits holds, and looking it up changes nothing."""

from __future__ import annotations

from thinned_tables import follows

from lowtide.transitions import Row, Table

TABLE = Table(
    (
        Row(("open", "ajar"), "push", ("windy", "light"), "shut", "slam", "bang"),
        Row(("open",), "push", ("light",), "shut", "close"),
        Row((), "push", (), None, "creak"),
    ),
    nothing="",
)


def test_the_first_row_that_fits_holds() -> None:
    assert follows(TABLE, "open", "push", ["light", "windy", "wet"]) == ("shut", "slam")
    assert follows(TABLE, "open", "push", ["light"]) == ("shut", "close")
    assert follows(TABLE, "ajar", "push", ["light"]) == ("ajar", "creak"), "a row is for its states"
    assert TABLE.row("ajar", "push", {"windy", "light"}).warning == "bang"


def test_where_no_row_fits_nothing_follows() -> None:
    row = TABLE.row("open", "pull", ["light"])
    assert (row.then, row.action, row.warning) == (None, "", "")
    assert follows(TABLE, "open", "pull") == ("open", "")
