"""Write a report into a file: its name's ending says as what."""

from __future__ import annotations

import importlib.util
import os
import pickle
from pathlib import Path

from lowtide.errors import LowtideError, expect
from lowtide.report.page import page
from lowtide.report.report import Report
from lowtide.report.stacked import stacked_picture
from lowtide.report.viewer import snapshot

ENDINGS = (".html", ".png", ".pdf", ".svg", ".pickle")


def save_report(report: Report, path: str | Path) -> Path:
    """Write a report into a file.

    Args:
        report: what to show.
        path: ``.html`` for the page, ``.png``, ``.pdf`` or ``.svg`` for a picture of memory over time,
            ``.pickle`` for the planned step in the form that PyTorch's memory viewer reads.

    Returns:
        The file's path.

    Raises:
        LowtideError: there is no such ending, matplotlib is missing, or the file cannot be written.
    """
    expect(isinstance(report, Report), "save_report(report=)", report, "what make_report returns")
    check_path(path)
    file = Path(path)
    try:
        if file.suffix == ".html":
            file.write_text(page(report), encoding="utf-8")
        elif file.suffix == ".pickle":
            file.write_bytes(pickle.dumps(snapshot(report.planned)))
        else:
            stacked_picture(report).savefig(file, dpi=150)
    except OSError as error:
        raise LowtideError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    return file


def check_path(path: str | Path) -> None:
    """Refuse a name that no report can be written to.

    Raises:
        LowtideError: there is no such ending, or what it needs is not installed, or there is no such folder.
    """
    expect(isinstance(path, str | os.PathLike), "a report's path", path, "a file's path")
    ending, folder = Path(path).suffix, Path(path).parent
    if ending not in ENDINGS:
        raise LowtideError(
            f"a report cannot be written to {str(path)!r}: choose a name that ends in .html for the page, "
            ".png, .pdf or .svg for a picture, or .pickle for PyTorch's memory viewer"
        )
    if not folder.is_dir():
        raise LowtideError(f"a report cannot be written to {str(path)!r}: there is no folder {str(folder)!r}")
    if ending in (".png", ".pdf", ".svg") and importlib.util.find_spec("matplotlib") is None:
        raise LowtideError(
            f"a {ending} picture needs matplotlib: pip install 'lowtide[train]', or choose .html"
        )
