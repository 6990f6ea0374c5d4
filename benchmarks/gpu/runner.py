"""Runs the parts in turn, each in a process of its own, and takes down every row when it is known."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.rows import ROOT, Row
from benchmarks.gpu.table import rendered

NO_CARD = "NO_CARD_BUILD" in os.environ
"""This runs on PyTorch's CUDA build without a card (tests/cuda_build): a plug-in comes before each part."""

ENOUGH_SECONDS = 12
"""With less time than this left no process is started."""


@dataclass
class Results:
    """The rows so far, in a folder: ``gpu.json``, and as tables in ``gpu.md``.

    Attributes:
        folder: where they are kept.
        run: what they follow from; rows of another one there are moved aside.
        about: of the card, the versions, the commit.
        rows: part and row -> what is known of it.
    """

    folder: Path
    run: str
    about: dict[str, Any]
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    def resume(self, retry: bool) -> None:
        """Take up the rows of an earlier run of the same code on the same card; with ``retry`` not those that
        failed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "gpu.json"
        if not path.exists():
            return
        kept = json.loads(path.read_text())
        if kept["run"] != self.run:
            path.replace(self.folder / f"gpu-{kept['run']}.json")
            return
        self.rows = {
            (row["part"], row["row"]): row for row in kept["rows"] if not (retry and row["state"] == "failed")
        }

    def add(self, part: str, row: str, found: Row) -> None:
        """One more row: written at once, and whole."""
        self.rows[part, row] = {
            "part": part,
            "row": row,
            "at": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            **found,
        }
        self.write()

    def write(self) -> None:
        """Write both files."""
        rows = list(self.rows.values())
        text = json.dumps({"run": self.run, "about": self.about, "rows": rows}, indent=1)
        for name, content in (("gpu.json", text + "\n"), ("gpu.md", rendered(self.about, rows))):
            part = self.folder / f"{name}.part"
            part.write_text(content)
            part.replace(self.folder / name)


def about(small: bool) -> tuple[str, dict[str, Any]]:
    """What rows follow from, as a digest, and in words."""
    import torch

    from benchmarks.common import machine, run_key

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    found = {**machine(), "commit": commit or "unknown", "small": small}
    if NO_CARD:
        found["gpu"] = "No card, PyTorch's CUDA build: bytes, no times"
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["gpu_bytes"] = torch.cuda.get_device_properties(0).total_memory
    digest = hashlib.sha256(f"{run_key()} {small} {NO_CARD}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16], found


def run(
    parts: Sequence[Part],
    results: Results,
    deadline: float,
    small: bool,
    command: Callable[[Part, list[str]], list[str]] | None = None,
) -> bool:
    """Measure what is not known yet.

    Args:
        parts: most important first.
        results: where rows go.
        deadline: by `time.monotonic`; nothing runs beyond it, and what was under way then has no row.
        small: whether models are as small as a CPU needs them.
        command: what measures some rows of a part; the default is `child`.

    Returns:
        Whether every row is known.
    """
    for part in parts:
        while todo := [row for row in part.rows if (part.name, row) not in results.rows]:
            if deadline - time.monotonic() < ENOUGH_SECONDS:
                return False
            known = len(results.rows)
            for row, found in _measured(
                part, todo, results.folder, deadline, (command or command_of(small))(part, todo)
            ):
                results.add(part.name, row, found)
                print(f"{part.name}: {row}: {found['state']}", found.get("error", ""), flush=True)
            if len(results.rows) == known:
                return False  # the deadline
    return True


def command_of(small: bool) -> Callable[[Part, list[str]], list[str]]:
    """From a part and some of its rows to what measures them: `child`."""
    size, through = "small" if small else "full", ["no_card"] if NO_CARD else []
    python = [sys.executable, "-m", *through, "benchmarks.gpu.child"]
    return lambda part, rows: [*python, part.name, size, *rows]


def _measured(
    part: Part, todo: list[str], folder: Path, deadline: float, command: list[str]
) -> Iterator[tuple[str, Row]]:
    """Rows as a process tells them; where it dies or stands still, the row that it was at has failed (all of
    them, before it was ready). At the deadline it is ended, and nothing is said of that row.
    """
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **part.environment, "PYTHONPATH": os.pathsep.join(paths)}
    if NO_CARD and part.on_host:  # what is moved is compared, so it has to be there
        environment["NO_CARD_LIBRARY"] = environment["NO_CARD_COMPUTES"]
    log = folder / "gpu.log"
    with log.open("ab") as errors:
        began = errors.tell()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,  # closed when this process ends, by which that one knows
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True).start()
    left, ready, trouble = list(todo), False, ""
    try:
        while left and not trouble:
            now = time.monotonic()
            wait = min(part.limit_seconds, deadline - now)
            try:
                line = lines.get(timeout=max(0.0, wait))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return
                trouble = f"took longer than {part.limit_seconds:.0f} s"
                continue
            if line is None:
                code = process.wait()
                if ready and len(left) < len(todo) and code == 0:
                    return  # ended by itself after a row that failed
                trouble = f"the process ended with {_named(code)}: {_end_of(log, began)}"
                continue
            told = json.loads(line)
            if "row" in told:
                left.remove(told["row"])
                yield told["row"], told["found"]
            ready = True
    finally:
        _end(process)
    for row in left[:1] if ready else left:
        if trouble:
            yield row, {"state": "failed", "error": trouble}


def _pass_on(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _named(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end_of(log: Path, began: int) -> str:
    """The last line that a process wrote; of one that crashed, where it was."""
    with log.open("rb") as file:
        file.seek(began)
        lines = file.read().decode(errors="replace").strip().splitlines()
    fatal = [at for at, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if fatal:
        lines = [" ".join(line.strip() for line in lines[fatal[0] : fatal[0] + 6])]
    return lines[-1][:800] if lines else "it said nothing"


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
