"""Notebooks run, what they assert holds, and a cell that printed when it was saved still does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def printed(book: Any) -> list[bool]:
    """Of each cell, whether it wrote to standard output."""
    return [any(o.get("name") == "stdout" for o in cell.get("outputs", ())) for cell in book.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(path, 4)
    saved = printed(book)
    assert any(saved)
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    assert printed(book) == saved, "run it again and save it"
