"""What plans decided, kept in files for whoever plans the same step again in another process.

What is found here is simulated exactly before it is taken (`lowtide.run.limit.planning`). So a file that is
out of date or damaged can waste a moment, and nothing else. ``LOWTIDE_CACHE`` names the folder of the files,
or is ``off``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
import platform
import tempfile
from contextlib import suppress
from pathlib import Path

from lowtide.graph import StepGraph
from lowtide.version import __version__

_LOG = logging.getLogger(__name__)
_MOST_OF_A_STEP = 8
_MOST_FILES = 256
_NEAR = 0.001
"""Budgets so near each other, as a share, are one: scratch is measured anew in each process."""

_OFF = ("off", "0", "no", "false")


def folder() -> Path | None:
    """Where files are kept, or ``None`` where that is turned off."""
    named = os.environ.get("LOWTIDE_CACHE", "")
    if named.lower() in _OFF:
        return None
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lowtide" / "plans"


class Cache:
    """Sets of stored values by step and budget, the newest first.

    Args:
        root: the folder of the files, or ``None`` to keep nothing. One that cannot be read or written is as
            good as none.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root

    def of(self, graph: StepGraph, budget: int) -> list[frozenset[int]]:
        """What plans for such a step and budget stored."""
        return [
            frozenset(value for value in stored if 0 <= value < len(graph.values))
            for stored, known in self._read(graph)
            if abs(known - budget) <= _NEAR * budget
        ]

    def keep(self, graph: StepGraph, budget: int, stored: frozenset[int]) -> None:
        """Keep what a plan for ``graph`` stored; what was known for the same budget goes."""
        if self._root is None:
            return
        others = [row for row in self._read(graph) if row[1] != budget]
        text = json.dumps([(sorted(stored), budget), *others][:_MOST_OF_A_STEP], separators=(",", ":"))
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(prefix="writing-", dir=self._root)
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.replace(name, self._path(graph))  # whole or not at all
            finally:
                Path(name).unlink(missing_ok=True)
            self._let_go()
        except OSError as error:
            _LOG.info("nothing is kept in %s (%s: %s)", self._root, type(error).__name__, error)

    def _path(self, graph: StepGraph) -> Path:
        """The file for steps like this, of this machine and version."""
        assert self._root is not None
        text = f"{__version__} {platform.node()} {graph.fingerprint()}"
        return self._root / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def _read(self, graph: StepGraph) -> list[tuple[list[int], int]]:
        if self._root is None:
            return []
        path = self._path(graph)
        try:
            rows = json.loads(path.read_text())
            found = [(list(map(operator.index, row)), operator.index(budget)) for row, budget in rows]
            os.utime(path)  # the least recently used go first
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, RecursionError) as error:
            _LOG.info("ignoring %s, which cannot be read (%s: %s)", path, type(error).__name__, error)
            return []
        return found

    def _let_go(self) -> None:
        """Remove the least recently used files where there are too many."""
        assert self._root is not None
        with suppress(FileNotFoundError):  # another process was faster
            files = sorted(self._root.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in files[:-_MOST_FILES]:
                path.unlink()
