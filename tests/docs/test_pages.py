"""What the pages name is there: messages, names, options, versions."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import lowtide
from lowtide import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLACE = "\0"
"""Stands in a message for what changes."""

HEADINGS = re.findall(r"^### (.+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


def literal(node: ast.AST) -> str | None:
    """The text of a string, with `PLACE` for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or PLACE for part in node.values)
    return None


@pytest.fixture(scope="module")
def messages() -> str:
    """All strings of the source."""
    files = (ROOT / "src").rglob("*.py")
    found = [literal(node) for path in files for node in ast.walk(ast.parse(path.read_text()))]
    return "\n".join(text for text in found if text)


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_message_under_troubleshooting_is_one_that_the_code_says(heading: str, messages: str) -> None:
    parts = [re.escape(part) for part in heading.split("...")]
    anything = rf"(?:\.\.\.|[^\n{PLACE}]*{PLACE}[^\n]*?)"
    assert re.search(anything.join(parts), messages), f"no message says {heading!r}"


def test_the_pages_of_the_reference_have_every_public_name() -> None:
    shown = set(re.findall(r"heading: ([\w.]+)", "".join(p.read_text() for p in (DOCS / "api").glob("*.md"))))
    missing = {f"lowtide.{name}" for name in lowtide.__all__} - shown - {"lowtide.policies"}
    for room in ("optim", "parallel", "estimate"):
        names = importlib.import_module(f"lowtide.{room}").__all__
        missing |= {f"lowtide.{room}.{name}" for name in names} - shown
    policies = {f"lowtide.policies.{name}" for name in lowtide.policies.__all__}
    assert not (missing | policies - shown), "add them to docs/api"


def test_what_people_are_sent_to_is_there() -> None:
    app = typer.main.get_command(cli.app)
    given: Any = app
    params = [param for command in given.commands.values() for param in command.params]
    options = {option for param in params for option in param.opts}
    ours = [line.rsplit("|", 2)[1] for line in (DOCS / "migrate.md").read_text().splitlines() if "|" in line]
    spans = [span for cell in ours for span in re.findall(r"`([^`]+)`", cell)]
    assert len(spans) > 50
    for span in spans:
        for name in re.findall(r"\blowtide(?:\.\w+)+", span):
            assert resolved(name) is not None, name
        if span.startswith("lowtide "):
            assert set(re.findall(r"--[\w-]+", span)) <= options, span


def resolved(name: str) -> Any:
    """The object behind a dotted name."""
    found: Any = lowtide
    path = "lowtide"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        found = getattr(found, part, None) or importlib.import_module(path)
    return found


def test_the_newest_section_of_the_changelog_is_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == lowtide.__version__


def test_only_the_version_that_is_prepared_is_unreleased() -> None:
    """The newest heading of the changelog is this version; every one below has the date of its release."""
    headings = re.findall(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    (newest, _), *released = headings
    assert newest == lowtide.__version__ and released
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in released)


def test_what_the_design_names_is_there() -> None:
    design = (DOCS / "design.md").read_text()
    files = re.findall(r"`([\w/]+(?:/|\.py))`", design)
    missing = [name for name in files if not any((ROOT / at / name).exists() for at in ("", "src/lowtide"))]
    assert len(files) > 30 and missing == []
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    methods = re.findall(r"`([A-Z]\w+)\.(\w+)`", design)
    assert len(methods) > 5
    for kind, method in methods:
        assert f"class {kind}" in source and f"def {method}(" in source, f"{kind}.{method}"


def test_the_design_is_short() -> None:
    lines = (DOCS / "design.md").read_text().splitlines()
    assert len(lines) < 200 and max(len(line) for line in lines if not line.startswith("| ")) <= 120


def test_files_that_pages_and_the_makefile_name_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *sorted(DOCS.rglob("*.md"))]
    named = {
        (page.name, path.rstrip("./"))
        for page in pages
        for path in re.findall(r"(?<![\w/.-])(?:src|tests|examples)/[\w/.]+", page.read_text())
    }
    missing = [(page, path) for page, path in sorted(named) if not any(ROOT.glob(path + "*"))]
    assert len(named) > 20 and missing == []
