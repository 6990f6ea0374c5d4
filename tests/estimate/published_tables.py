"""The published figures beside these tests, one table a file."""

from __future__ import annotations

import csv
from pathlib import Path

HERE = Path(__file__).parent / "published"


def table(name: str) -> list[dict[str, str]]:
    """The rows of ``published/NAME.csv``."""
    with open(HERE / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def facts(paper: str) -> dict[str, dict[str, str]]:
    """The single figures of a paper, by their first column."""
    return {next(iter(row.values())): row for row in table(f"{paper}_facts")}
