"""Notebooks run, what they assert holds, and every cell that printed something when it was saved still does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def printed(book: Any) -> list[str]:
    """What its cells wrote to standard output."""
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    return [output["text"] for output in outputs if output.get("name") == "stdout"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(path, 4)
    saved = printed(book)
    assert saved
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    assert len(printed(book)) == len(saved), "run it again and save it"
