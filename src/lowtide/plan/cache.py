"""Decisions of earlier plans of a program: in memory, for another size or budget of the step, and in files,
for other processes.

They are only starting points (`lowtide.plan.carry`): the exact simulator and the bound judge them anew. So a
file that is out of date, damaged or from another machine costs a moment, and nothing else. The files are in
``LOWTIDE_CACHE``, unless that is ``off``.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lowtide.graph import StepGraph
from lowtide.native import NO_CACHE, cache_folder

_LOG = logging.getLogger(__name__)
_MOST_OF_A_PROGRAM = 8
_MOST_FILES = 256


@dataclass(frozen=True)
class Decisions:
    """What one plan decided.

    Attributes:
        stored: the values that stay.
        budget_bytes: what the plan was allowed.
        plain_peak_bytes: of its step, which tells sizes of one program apart.
        gap: to the bound's linear program, as a share of the step.
    """

    stored: tuple[int, ...]
    budget_bytes: int
    plain_peak_bytes: int
    gap: float


def folder() -> Path | None:
    """Where files are kept, or ``None`` where that is turned off."""
    off = os.environ.get("LOWTIDE_CACHE", "").lower() in NO_CACHE
    return None if off else cache_folder() / "plans"


class Cache:
    """Decisions by program, the newest first.

    Args:
        root: the folder of the files, or ``None`` for this process alone. One that cannot be read or written
            counts as none.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._known: dict[str, list[Decisions]] = {}

    def of(self, graph: StepGraph) -> list[Decisions]:
        """What is known of the step's program."""
        digest = graph.fingerprint(sizes=False)
        if digest not in self._known:
            self._known[digest] = self._read(digest)
        return list(self._known[digest])

    def keep(self, graph: StepGraph, new: Decisions) -> None:
        """Keep what was decided for ``graph``, in place of older decisions for the same budget and size."""
        digest = graph.fingerprint(sizes=False)
        same = (new.budget_bytes, new.plain_peak_bytes)
        # another process may have kept something meanwhile
        older = dict.fromkeys([*self._known.get(digest, ()), *self._read(digest)])
        others = [one for one in older if (one.budget_bytes, one.plain_peak_bytes) != same]
        self._known[digest] = [new, *others][:_MOST_OF_A_PROGRAM]
        self._write(digest)

    def _read(self, digest: str) -> list[Decisions]:
        if self._root is None:
            return []
        path = self._root / f"{digest}.json"
        try:
            found = [
                Decisions(
                    tuple(map(operator.index, row["stored"])),
                    operator.index(row["budget_bytes"]),
                    operator.index(row["plain_peak_bytes"]),
                    float(row["gap"]),
                )
                for row in json.loads(path.read_text())
            ]
            os.utime(path)  # the least recently used go first
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _LOG.info("ignoring %s, which cannot be read (%s: %s)", path, type(error).__name__, error)
            return []
        return found

    def _write(self, digest: str) -> None:
        if self._root is None:
            return
        text = json.dumps([asdict(one) for one in self._known[digest]], separators=(",", ":"))
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(prefix="writing-", dir=self._root)
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.replace(name, self._root / f"{digest}.json")  # whole or not at all
            finally:
                Path(name).unlink(missing_ok=True)
            self._prune()
        except OSError as error:
            _LOG.info("nothing is kept in %s (%s: %s)", self._root, type(error).__name__, error)

    def _prune(self) -> None:
        """Remove the least recently used files where there are too many."""
        assert self._root is not None
        with suppress(FileNotFoundError):  # another process was faster
            files = sorted(self._root.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in files[:-_MOST_FILES]:
                path.unlink()
