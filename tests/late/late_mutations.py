"""Every wait and every recorded event of what moves bytes, each to be taken away (`late_worker`)."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "lowtide"

PLACES = (
    "accelerator.py",
    "optim/background.py", "optim/checkpoint.py", "optim/clip.py", "optim/host.py", "optim/link.py",
    "optim/pipeline.py", "optim/slots.py", "optim/stream.py", "run/record/values.py",
    "extensions/moves/engine.py",
    "extensions/moves/store/disk.py", "extensions/moves/store/host.py", "extensions/moves/store/lanes.py",
    "extensions/moves/store/slab.py", "extensions/moves/store/tier.py",
)  # fmt: skip
"""Where bytes move beside the program. Not optim/balance.py and plan/speeds.py: they only time."""

WAITS = ("join", "order", "record_stream", "settle", "synchronize", "wait", "wait_event", "wait_stream")
MARKS = ("mark", "ready", "record")
"""The names of what waits, and of what records an event."""


class Site(NamedTuple):
    """A call, the ``number``-th of those that read the same in its function.

    Attributes:
        place: the file, below the package.
        function: its qualified name.
    """

    place: str
    function: str
    call: str
    number: int

    def __str__(self) -> str:
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.place}: {self.function}: {self.call}{again}"


class _Finds(ast.NodeTransformer):
    """Lists the calls of a file, or takes one away."""

    def __init__(self, place: str, away: Site | None = None) -> None:
        self.place, self.away = place, away
        self.found: list[Site] = []
        self._scopes: list[str] = []

    def _scope(self, node: Any) -> Any:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()
        return node

    visit_FunctionDef = visit_ClassDef = _scope

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name, text = getattr(node.func, "attr", ""), ast.unparse(node)
        taken = name in MARKS or (name in WAITS and not (name == "join" and node.args))  # as "".join(these)
        site = None
        if taken and self._scopes:
            function = ".".join(self._scopes)
            same = [s for s in self.found if s.function == function and s.call == text]
            self.found.append(site := Site(self.place, function, text, len(same)))
        self.generic_visit(node)
        if site is None or site != self.away:
            return node
        called = ast.Name(
            "__taken_away__", ast.Load()
        )  # with what it would have been called on, which happens
        on = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        return ast.copy_location(ast.Call(called, [ast.Constant(name), on, *node.args], []), node)


def _taken_away(name: str, *_: Any) -> Any:
    import torch

    event = torch.Event("cuda")  # which never was recorded: nobody waits for it
    return {"mark": event, "ready": (event,)}.get(name)


@cache
def sites() -> tuple[Site, ...]:
    """All of them."""
    found: list[Site] = []
    for place in PLACES:
        finds = _Finds(place)
        finds.visit(ast.parse((SOURCE / place).read_text()))
        found += finds.found
    return tuple(found)


def _code(within: CodeType, path: list[str]) -> CodeType:
    for name in path:
        within = next(c for c in within.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return within


@contextmanager
def without(site: Site) -> Iterator[None]:
    """The product without that call."""
    file = SOURCE / site.place
    tree = ast.fix_missing_locations(_Finds(site.place, site).visit(ast.parse(file.read_text())))
    found: Any = importlib.import_module("lowtide." + site.place[:-3].replace("/", "."))
    path: list[str] = []
    for name in site.function.split("."):
        path.append(name)
        found = inspect.getattr_static(found, name)
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if not inspect.isclass(found):
            break  # a function within it is a constant of its code
    function = inspect.unwrap(found)
    # annotations are no code, but the future that leaves them alone belongs to the file
    before = function.__code__
    builtins.__taken_away__ = _taken_away  # type: ignore[attr-defined]
    function.__code__ = _code(compile(tree, str(file), "exec"), path)
    try:
        yield
    finally:
        function.__code__ = before
