"""Notebooks run, what they assert holds, and a cell that printed when it was saved still does."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def printed(book: Any) -> list[bool]:
    """Of each cell, whether it wrote to standard output."""
    return [any(o.get("name") == "stdout" for o in cell.get("outputs", ())) for cell in book.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    book = nbformat.read(path, 4)
    names: dict[str, Any] = {"__name__": "__main__"}
    told = []
    for cell in book.cells:
        with redirect_stdout(io.StringIO()) as said:
            if cell.cell_type == "code":
                exec(compile(cell.source, str(path), "exec"), names)
        told.append(bool(said.getvalue()))
    assert any(told) and told == printed(book), "run it again and save it"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_its_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(path, 4)
    saved = printed(book)
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    assert printed(book) == saved, "run it again and save it"
