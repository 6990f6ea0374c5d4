"""Every name of `lowtide.private` has a test, and nobody else takes private names from PyTorch."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

import lowtide
from lowtide import private

PACKAGE = Path(inspect.getfile(lowtide)).parent
STANDS_APART = PACKAGE / "parallel" / "pipelining.py"  # its own test is tests/parallel/test_pipelining.py
OURS = {"os._exit", "sys._getframe"}  # private to Python


def test_every_name_has_a_test() -> None:
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    later = [import_module(f"lowtide.private.{file}") for file in private._LATER]
    items = [(name, item) for home in later for name, item in vars(home).items() if is_own(item, home)]
    items += [pair for pair in vars(private).items() if not inspect.ismodule(pair[1])]
    names = [name for name, _ in items if name[0] != "_"]
    assert len(names) > 50
    assert [name for name in names if f"private.{name}" not in text] == []


def is_own(item: object, home: ModuleType) -> bool:
    """Whether a module defines this function."""
    return getattr(item, "__module__", None) == home.__name__


def test_every_file_says_where_it_was_seen() -> None:
    for file in (PACKAGE / "private").glob("[a-z]*.py"):
        assert re.search(
            r"Seen in PyTorch 2\.\d+ to 2\.\d+", ast.get_docstring(ast.parse(file.read_text())) or ""
        )


def test_nobody_else_takes_private_names() -> None:
    trees = {
        file: ast.parse(file.read_text())
        for file in PACKAGE.rglob("*.py")
        if file.parent.name != "private" and file != STANDS_APART
    }
    own = {name for tree in trees.values() for name in _defined(tree)}
    found = [
        f"{file.relative_to(PACKAGE)}: {name}"
        for file, tree in trees.items()
        for name in _taken(tree)
        if name.rpartition(".")[2] not in own or name.startswith("torch.")
    ]
    named = [one for one in found if not one.endswith("._replace")]  # a named tuple's own
    assert [one for one in named if one.rpartition(": ")[2] not in OURS] == []


def _defined(tree: ast.AST) -> set[str]:
    """Names that the code gives to something itself."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # __slots__
            found.add(node.value)
    return found


def _taken(tree: ast.AST) -> set[str]:
    """Private names that the code takes from others; operations (`torch.ops.aten._to_copy`) are none."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr):
            name = ast.unparse(node)
            if not name.startswith("torch.ops.aten."):
                found.add(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name for name in names if "._" in name or "._internal" in name)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if re.match(r"torch\..*\._|torch\._", alias.name))
    return found


def test_trees() -> None:
    tree = ({"a": 1, "b": [2, torch.ones(1)]}, 3)
    leaves, structure = private.tree_flatten(tree)
    assert leaves[:2] == [1, 2] and leaves[3] == 3 and private.tree_leaves(tree)[:2] == [1, 2]
    assert structure == private.tree_flatten(({"a": 5, "b": [6, 7]}, 8))[1]
    assert hash(structure) == hash(private.tree_flatten(({"a": 5, "b": [6, 7]}, 8))[1])
    assert private.tree_unflatten(leaves, structure) == tree
    assert private.tree_map(lambda item: 0, tree) == ({"a": 0, "b": [0, 0]}, 0)
    mapped = private.tree_map_only(torch.Tensor, lambda tensor: "t", tree)
    assert mapped == ({"a": 1, "b": [2, "t"]}, 3)
