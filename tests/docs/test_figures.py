"""Figures on the pages are those of the result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_a_page_shows_what_was_measured(page: Path) -> None:
    text = page.read_text()
    assert figures.filled(text) == text, "run `python -m benchmarks figures`"


def test_every_figure_is_shown_somewhere() -> None:
    shown = {mark[2] for page in figures.pages() for mark in figures.MARKS.finditer(page.read_text())}
    assert shown == set(figures.FIGURES)


def test_every_technique_shows_a_figure_or_says_why_not() -> None:
    pages = [page for page in (figures.DOCS / "techniques").glob("*.md") if page.stem != "index"]
    assert len(pages) >= 10
    for page in pages:
        text = page.read_text()
        assert "## Measured" in text
        for row in ("| saves |", "| costs |", "| bits |", "| use it when |"):
            assert row in text, f"{page.name} does not say {row}"
