"""Who is still there: a rank that died or failed ends the run on all others, with its name.

A collective whose partner is gone either fails with a text about sockets or waits for its timeout. So every
rank says once a second, in the store under which the ranks met, that it lives and what it is doing, and a
thread listens to the others. A process on the same machine is missed as soon as it is gone (one that a
debugger has stopped is not), one elsewhere after `SILENT_SECONDS`. The thread then gives the main thread
`GRACE_SECONDS` to end with an error of its own, which most collectives raise by themselves, and ends the
process otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError

BEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0
GRACE_SECONDS = 4.0
_AFTER = "after "


class RankError(LowtideError):
    """Another rank died or failed."""


class Alive:
    """Says that this rank lives, and listens to the others.

    Args:
        store: where the ranks met; a connection of its own is made to it.
        rank, size: of this process.
        end: what ends the process when the main thread does not; it gets the message.
    """

    def __init__(self, store: Any, rank: int, size: int, *, end: Callable[[str], None] | None = None) -> None:
        self._doing = "the start"
        self._store = store.clone()
        # torchrun's store outlives an attempt
        self._prefix = f"lowtide/alive/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._end = end or _end
        self._found = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._cause = ""
        self._peers: dict[int, dict[str, Any]] = {}
        self._heard = dict.fromkeys(self._others, (0, time.monotonic()))
        self._beat = 0
        self._last: dict[str, Any] = {}
        self._say()
        self._thread = threading.Thread(target=self._watch, name="lowtide-alive", daemon=True)
        self._thread.start()

    def doing(self, what: str) -> None:
        """Say what this rank does from now on, for the others' messages."""
        self._doing = what
        with contextlib.suppress(RuntimeError):  # a store that is gone is the thread's to tell
            self._say()

    def cause(self, wait_seconds: float = 3 * BEAT_SECONDS + 2) -> str:
        """What happened to another rank; empty when nothing was found within the time."""
        self._found.wait(wait_seconds)
        return self._cause

    def failed(self, message: str) -> None:
        """Tell the others that this rank ends with an error, and stop listening."""
        self._stop.set()
        with contextlib.suppress(RuntimeError):
            self._last = {"failed": message}
            self._say()
            if self._hosts:
                self._linger()

    def close(self) -> None:
        """Tell the others that this rank has done its work, and stop listening."""
        self._stop.set()
        with contextlib.suppress(RuntimeError):
            self._last = {"done": True}
            self._say()
        self._thread.join(timeout=5)

    def _linger(self) -> None:
        """Stay until the others have read what happened: the store ends with this process."""
        until = time.monotonic() + GRACE_SECONDS + 2 * BEAT_SECONDS
        while time.monotonic() < until:
            peers = [self._read(rank) for rank in self._others]
            if all(
                about is None or about.get("failed") or about.get("done") or _gone(about) for about in peers
            ):
                return
            time.sleep(BEAT_SECONDS / 10)

    def _say(self) -> None:
        with self._lock:
            self._beat += 1
            about = {
                "beat": self._beat,
                "pid": os.getpid(),
                "machine": _machine(),
                "host": socket.gethostname(),
                "doing": self._doing,
                **self._last,
            }
            self._store.set(f"{self._prefix}/{self._rank}", json.dumps(about))

    def _watch(self) -> None:
        while not self._stop.wait(
            BEAT_SECONDS if len(self._peers) == len(self._others) else BEAT_SECONDS / 10
        ):
            cause = self._look()
            if cause and not self._stop.is_set():
                self._cause = cause
                self._found.set()
                if not self._stop.wait(GRACE_SECONDS):
                    self.failed(_AFTER + cause)
                    self._end(cause)
                return

    def _look(self) -> str:
        """What happened to another rank, or empty."""
        gone = [rank for rank, about in self._peers.items() if _gone(about)]
        lost = ""
        try:
            self._say()
            for rank in self._others:  # after the look at processes: what one said at last counts
                if (about := self._read(rank)) is not None:
                    self._peers[rank] = about
        except RuntimeError as error:
            lost = (
                "the store that connects the ranks is gone, and with it rank 0 or torchrun "
                f"({str(error).splitlines()[0]})"
            )
        told = [words for rank, about in self._peers.items() if (words := _error_of(rank, about))]
        died = [
            f"rank {rank} {_place(about)} died during {about['doing']}"
            for rank in gone
            if not (about := self._peers[rank]).get("done")
        ]
        return next(iter([*told, *died, lost] if lost else [*told, *died, *self._silent()]), "")

    def _silent(self) -> Iterator[str]:
        """Which ranks on other machines have said nothing for long."""
        now = time.monotonic()
        for rank in self._others:
            about = self._peers.get(rank)
            beat, since = self._heard[rank]
            if about is not None and (
                about["beat"] != beat or about.get("done") or about["machine"] == _machine()
            ):
                self._heard[rank] = about["beat"], now
            elif now - since > SILENT_SECONDS:
                where = (
                    "has sent no heartbeat"
                    if about is None
                    else f"{_place(about)} was last heard during {about['doing']}"
                )
                yield f"rank {rank} {where} and has been silent for {now - since:.0f} seconds"

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._prefix}/{rank}"
        with self._lock:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None


@contextmanager
def guarded(alive: Alive | None) -> Iterator[None]:
    """A block that needs the other ranks: when one of them is gone, the error names it.

    Raises:
        RankError: another rank died or failed.
    """
    if alive is None:
        yield
        return
    try:
        yield
    except LowtideError as error:
        alive.failed(str(error))
        raise
    except (Exception, KeyboardInterrupt) as error:
        # torchrun asks to terminate as soon as one is dead: first the name, in a few seconds
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        cause = alive.cause() if isinstance(error, RuntimeError) else ""
        if not cause:
            alive.failed(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
            raise
        alive.failed(_AFTER + cause)
        raise RankError(cause) from error
    alive.close()


def _gone(about: dict[str, Any]) -> bool:
    """Whether a rank's process is known to have ended."""
    return about["machine"] == _machine() and not _lives(about["pid"])


def _place(about: dict[str, Any]) -> str:
    return f"(process {about['pid']} on {about['host']})"


def _error_of(rank: int, about: dict[str, Any]) -> str:
    """The error that a rank ended with, or empty; where it ended because of another rank, that one's."""
    failed: str = about.get("failed", "")
    if failed.startswith(_AFTER):
        return failed.removeprefix(_AFTER)
    return f"rank {rank} failed during {about['doing']}: {failed}" if failed else ""


def _end(message: str) -> None:
    print(f"lowtide: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def _machine() -> str:
    """What tells machines, and containers on one machine, apart: processes see each other under equal
    ones.
    """
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _lives(pid: int) -> bool:
    """Whether a process of this machine runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return True
