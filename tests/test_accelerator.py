"""One file says what an accelerator can do; outside it nothing asks for CUDA by name."""

from __future__ import annotations

import ast
from pathlib import Path

import lowtide

SOURCE = Path(lowtide.__file__).parent

NAMED = {
    "accelerator.py": "the one file",
    "compiled/lower.py": "names that Inductor's wrappers call",
    "estimate": "cards, which need not be there",
    "extensions/reserved/card.py": "CUDA's allocator, as it is set",
    "meter/cuda.py": "CUDA's own allocator and its statistics",
    "meter/allocator.py": "the name of that meter",
    "meter/peaks.py": "the same, and what users type",
    "private": "what PyTorch hides of CUDA",
    "report/report.py": "a step's device, as text",
    "train/options.py": "what users type",
    "train/planning.py": "a step's device, as text",
    "train/ranks.py": "what users type, and the name of a backend",
}
"""Where CUDA is named, and why."""


def named(tree: ast.AST) -> set[str]:
    """What names CUDA in a file: `torch.cuda`, ``"cuda"`` and ``"cuda:0"``; not texts that speak of it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            found.add(ast.unparse(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if text == "cuda" or (text.startswith("cuda:") and " " not in text):
                found.add(text)
    return found


def test_only_these_name_cuda() -> None:
    found = set()
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE).as_posix()
        if named(ast.parse(file.read_text())):
            found.add(place if place in NAMED else place.split("/")[0] if "/" in place else place)
            assert place in NAMED or place.split("/")[0] in NAMED, (
                f"{place} names CUDA: ask lowtide.accelerator"
            )
    assert found == set(NAMED), "one of them names it no more"


def test_what_names_cuda_is_found() -> None:
    assert named(ast.parse("torch.cuda.synchronize()")) == {"torch.cuda"}
    assert named(ast.parse("device.type == 'cuda' or f'cuda:{at}'")) == {"cuda", "cuda:"}
    assert not named(ast.parse("'pass cuda: it is there'"))
