"""Timings, graphs and plans kept across runs, in files under the user's cache folder.

``LOWTIDE_CACHE`` names another folder, or is ``off``. What is kept belongs to one machine and the installed
versions of lowtide and PyTorch. Files hold JSON and nothing that is executed; each is written whole or not at
all, one that cannot be read is ignored, and the least recently used go when there are too many bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import platform
import tempfile
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lowtide.errors import PlanError
from lowtide.graph import GRAPH_FORMAT, StepGraph
from lowtide.plan.data import PLAN_FORMAT, Plan

_LOG = logging.getLogger(__name__)
_FORMAT = 1
_MOST_BYTES = 256 << 20
_OFF = ("off", "0", "no", "false")

Costs = dict[str, dict[str, Any]]
"""key of a call (`stable_key`) -> the fields of its cost"""


def stable_key(*parts: Hashable) -> str:
    """A digest of what ``parts`` look like in print: the same in every process, unlike ``hash``.

    >>> stable_key("aten.mm.default", (2, 3)) == stable_key("aten.mm.default", (2, 3))
    True
    """
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def graph_digest(graph: StepGraph) -> str:
    """A digest of everything in a step graph that decides what memory a plan takes; times are no part of it,
    so it is the same in every run.
    """
    text = json.dumps(
        [
            graph.structure(),
            [op.scratch_bytes for op in graph.operations],
            graph.outputs,
            graph.withheld,
            graph.aside,
            graph.claims,
            graph.device,
            graph.source,
        ],
        separators=(",", ":"),
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def machine_key(*more: Hashable) -> str:
    """What costs and plans depend on beside the step: processor, cores, versions, and ``more`` (threads, the
    accelerator's name).
    """
    names = []
    for package in ("lowtide", "torch"):
        try:
            names.append(version(package))
        except PackageNotFoundError:
            names.append("")
    return stable_key(
        platform.machine(),
        _processor(),
        os.cpu_count(),
        platform.python_version(),
        *names,
        PLAN_FORMAT,
        GRAPH_FORMAT,
        *more,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def folder() -> Path | None:
    """Where things are kept, or ``None`` where that is turned off."""
    named = os.environ.get("LOWTIDE_CACHE", "")
    if named.lower() in _OFF:
        return None
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lowtide" / "plans"


@dataclass(frozen=True)
class Cache:
    """Costs, graphs and plans on disk. One that is turned off, or whose folder cannot be written, holds
    nothing and keeps nothing.

    Attributes:
        root: the folder, or ``None``.
        machine: as of `machine_key`.
        most_bytes: what all files may take together.

    Example:
        >>> cache = Cache.open()
        >>> cache.costs("my model") is None or isinstance(cache.costs("my model"), dict)
        True
    """

    root: Path | None
    machine: str = ""
    most_bytes: int = _MOST_BYTES

    @classmethod
    def open(cls, *more: Hashable, most_bytes: int = _MOST_BYTES) -> Cache:
        """The user's cache for this machine; ``more`` is as of `machine_key`."""
        root = folder()
        if root is not None and not _ours(root):
            root = None
        return cls(root, machine_key(*more), most_bytes)

    def costs(self, key: str) -> Costs | None:
        """The costs that were kept under ``key``."""
        found = self._read("costs", key)
        if isinstance(found, dict) and all(isinstance(row, dict) for row in found.values()):
            return found
        return None

    def keep_costs(self, key: str, costs: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep costs under ``key``, beside those that are there."""
        self._write(
            "costs", key, {**(self.costs(key) or {}), **{name: dict(row) for name, row in costs.items()}}
        )

    def graph(self, key: str) -> StepGraph | None:
        """The graph that was kept under ``key``."""
        return self._read("graph", key, StepGraph.from_json)

    def keep_graph(self, key: str, graph: StepGraph) -> None:
        """Keep a graph under ``key``: of the model, its inputs and modes."""
        self._write("graph", key, graph.to_json())

    def plan(self, digest: str, budget: int | None, policy: str) -> Plan | None:
        """The plan that was kept for a step (`graph_digest`), a budget in bytes and a policy's name."""
        return self._read("plan", stable_key(digest, budget, policy), Plan.from_json)

    def keep_plan(self, digest: str, budget: int | None, policy: str, plan: Plan) -> None:
        """Keep a plan for a step, a budget and a policy."""
        self._write("plan", stable_key(digest, budget, policy), plan.to_json())

    def _path(self, kind: str, key: str) -> Path | None:
        return (
            None
            if self.root is None
            else self.root / f"{kind}-{stable_key(_FORMAT, self.machine, kind, key)}.json.gz"
        )

    def _read(self, kind: str, key: str, build: Any = lambda data: data) -> Any:
        path = self._path(kind, key)
        if path is None:
            return None
        try:
            told = json.loads(gzip.decompress(path.read_bytes()))
            if told["for"] != [_FORMAT, self.machine, kind, key]:
                raise ValueError("it was kept for something else")
            found = build(told["what"])
            os.utime(path)  # the least recently used go first
            return found
        except FileNotFoundError:
            return None
        except (
            OSError,
            EOFError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            PlanError,
            zlib.error,
        ) as error:
            _LOG.warning("ignoring %s, which cannot be read (%s: %s)", path, type(error).__name__, error)
            return None

    def _write(self, kind: str, key: str, what: Any) -> None:
        path = self._path(kind, key)
        if path is None:
            return
        text = json.dumps({"for": [_FORMAT, self.machine, kind, key], "what": what}, separators=(",", ":"))
        try:
            handle, name = tempfile.mkstemp(prefix="writing-", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(gzip.compress(text.encode(), compresslevel=1, mtime=0))
                os.replace(name, path)
            finally:
                Path(name).unlink(missing_ok=True)
            self._let_go(path)
        except OSError as error:
            _LOG.warning("nothing is kept in %s (%s: %s)", path.parent, type(error).__name__, error)

    def _let_go(self, newest: Path) -> None:
        """Remove the least recently used files while all take too much; the newest stays."""
        found = []
        for path in newest.parent.glob("*.json.gz"):
            try:
                facts = path.stat()
            except OSError:  # another process was faster
                continue
            found.append((path == newest, facts.st_mtime_ns, facts.st_size, path))
        total = sum(size for _, _, size, _ in found)
        for last, _, size, path in sorted(found):
            if total <= self.most_bytes or last:
                return
            path.unlink(missing_ok=True)
            total -= size


def _ours(root: Path) -> bool:
    """Whether the folder is there, and nobody else may write to it."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = root.stat()
    except OSError as error:
        _LOG.warning("nothing is kept in %s (%s: %s)", root, type(error).__name__, error)
        return False
    if hasattr(os, "getuid") and (facts.st_uid != os.getuid() or facts.st_mode & 0o022):
        _LOG.warning(
            "nothing is kept in %s, which others may write to: set LOWTIDE_CACHE to another folder, or to "
            "'off'",
            root,
        )
        return False
    return os.access(root, os.W_OK | os.X_OK)
