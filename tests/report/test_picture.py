"""Pictures of memory: every peak stays visible, the budget line is where it belongs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.report import terminal_picture
from lowtide.report.picture import Curve

PLAIN = Curve("plain", [(i / 100, 100 - abs(50 - i)) for i in range(101)])
PLANNED = Curve("planned", [(i / 80, 80 - abs(50 - i)) for i in range(101)])


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1000)), max_size=50), st.integers(1, 40))
def test_no_column_loses_the_peak(moments: list[tuple[float, int]], count: int) -> None:
    curve = Curve("", sorted(moments))
    columns = curve.columns(count, curve.seconds or 1.0)
    assert len(columns) == count
    assert max((live for live in columns if live is not None), default=0) == curve.peak_bytes


def test_a_shorter_curve_ends_earlier() -> None:
    columns = PLAIN.columns(10, 2.0)
    assert columns[4] is not None
    assert columns[6:] == [None] * 4


def test_the_terminal_picture_fits_its_size_and_names_what_it_shows() -> None:
    rows = terminal_picture([PLAIN, PLANNED], budget_bytes=90, width=60, height=4).plain.split("\n")
    assert max(len(row) for row in rows) <= 60
    assert [rows[0], rows[5], rows[10]] == [
        "plain, peak 100 B, 1 s",
        "planned, peak 80 B, 1.25 s",
        "┄ budget 90 B",
    ]
    assert "█" in rows[1] and "█" not in rows[6], "only the plain step touches the top"
    assert "┄" in rows[1] and "┄" in rows[6] and "┄" not in rows[2], "the budget lies in the top row"


def test_a_step_without_memory_draws_all_the_same() -> None:
    assert "empty, peak 0 B" in terminal_picture([Curve("empty", [])]).plain
