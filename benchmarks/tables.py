"""What the pages of results are made of: result files, tables, figures as people read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from benchmarks.common import RESULTS


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:+.{digits}f} %"


def where(found: dict[str, Any]) -> str:
    """When, on what machine, and what is known to have run beside it (noted by hand in the result file)."""
    machine = found["machine"]
    beside = f", beside {machine['beside']}" if "beside" in machine else ""
    return (
        f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"Python {machine['python']}, lowtide {machine['lowtide']}{beside}"
    )


def yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def page_with_warnings(
    title: str,
    about: str,
    head: list[str],
    found: dict[str, Any],
    cells_of: Callable[[dict[str, Any]], list[str]],
    name_of: Callable[[dict[str, Any]], str],
) -> str:
    """The rows as a page, with the warnings that were said."""
    rows = found["rows"]
    lines = [f"# {title}", "", where(found), "", about, "", table(head, list(map(cells_of, rows))), ""]
    lines += ["Warnings:", ""]
    for row in rows:
        for one in row.get("warnings", []):
            said = " ".join(one["text"].split())
            lines.append(f"- {name_of(row)}: {one['count']} x, first in step {one['steps'][0]}: {said}")
    return "\n".join(lines) + "\n"
