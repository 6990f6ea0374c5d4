"""No file of the package imports, by way of others, itself: whoever reads one file can stop somewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lowtide

ROOT = Path(lowtide.__file__).parent


def test_there_are_no_circles() -> None:
    files = {_module(file): file for file in ROOT.rglob("*.py")}
    imports = {name: set(_imported(file, name, files)) for name, file in files.items()}
    assert [sorted(circle) for circle in _circles(imports)] == []


def test_a_circle_is_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}) == [{"b", "c"}]


def _module(file: Path) -> str:
    parts = ["lowtide", *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(file: Path, name: str, files: dict[str, Path]) -> Iterator[str]:
    """The package's files that one imports, within functions and for its types alone, too."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        above = package[: len(package) - node.level + 1] if node.level else []
        home = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{home}.{alias.name}"
            target = inner if inner in files else home
            if target in files and target != name:
                yield target


def _circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Sets of two or more that all reach each other."""
    reached: dict[str, set[str]] = {}
    for start in imports:
        ahead, seen = [*imports[start]], set[str]()
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += imports[name]
        reached[start] = seen
    circles: list[set[str]] = []
    for name in sorted(imports):
        circle = {other for other in reached[name] if name in reached[other]} | {name}
        if len(circle) > 1 and circle not in circles:
            circles.append(circle)
    return circles
