"""The code blocks of README and docs, and the names that those of a page are written around."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: what stands behind the fence.
        text: its lines.
        line: of its first one in the file.
        follows: whether only empty lines stand between it and the block before.
    """

    language: str
    text: str
    line: int
    follows: bool


def name_of(page: Path) -> str:
    """As tests call it."""
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text, found, end = page.read_text(), [], 0
    for match in FENCE.finditer(text):
        follows = bool(found) and not text[end : match.start()].strip()
        found.append(Block(match[1], match[2], text.count("\n", 0, match.start()) + 2, follows))
        end = match.end()
    return found
