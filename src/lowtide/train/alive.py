"""Who is still there: a rank that died or failed ends the run on all others, with its name.

A collective whose partner is gone either fails with a text about sockets or waits for its timeout. So every
rank says once a second, in the store under which the ranks met, that it lives and what it is doing, and a
thread listens to the others. A process on the same machine is missed as soon as it is gone; one elsewhere, or
one that was stopped, after `SILENT_SECONDS` or those that ``--silent-seconds`` names. One in a debugger is
waited for: it says so as it beats, or the system says so of a process on the same machine. The thread then
gives the main thread `GRACE_SECONDS` to end with an error of its own, which most collectives raise by
themselves, and ends the process otherwise.
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
from typing import Any

from lowtide.errors import LowtideError
from lowtide.processes import debugged, lives, machine

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
        silent_seconds: how long a rank may say nothing; ``None`` is `SILENT_SECONDS`, 0 for ever.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        end: Callable[[str], None] | None = None,
        silent_seconds: float | None = None,
    ) -> None:
        self._doing = "the start"
        self._store = store.clone()
        # torchrun's store outlives an attempt
        self._prefix = f"lowtide/alive/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._rank, self._size = rank, size
        self._hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._end = end or _end
        self._silent_seconds = SILENT_SECONDS if silent_seconds is None else silent_seconds
        self._found = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._cause = ""
        self._waited_for: set[int] = set()
        self._peers: dict[int, dict[str, Any]] = {}
        self._heard: dict[int, tuple[int, float]] = {}
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
            peers = [self._read(rank) for rank in range(self._size) if rank != self._rank]
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
                "machine": machine(),
                "host": socket.gethostname(),
                "doing": self._doing,
                "debugged": debugged(),
            }
            about.update(self._last)
            self._store.set(f"{self._prefix}/{self._rank}", json.dumps(about))

    def _watch(self) -> None:
        while not self._stop.wait(BEAT_SECONDS if len(self._peers) == self._size - 1 else BEAT_SECONDS / 10):
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
        gone = [  # known without the store, which may be gone with its owner
            rank for rank, about in self._peers.items() if not about.get("done") and _gone(about)
        ]
        told = [words for rank in gone if (words := self._last_words(rank))]
        if told:
            return told[0]
        for rank in gone:
            about = self._peers[rank]
            if not about.get("done"):
                return f"rank {rank} (process {about['pid']} on {about['host']}) died during {about['doing']}"
        try:
            self._say()
            now = time.monotonic()
            for rank in range(self._size):
                if rank != self._rank and (cause := self._hear(rank, now)):
                    return cause
        except RuntimeError as error:
            return (
                "the store that connects the ranks is gone, and with it rank 0 or torchrun "
                f"({str(error).splitlines()[0]})"
            )
        return ""

    def _hear(self, rank: int, now: float) -> str:
        """Listen to one rank."""
        about = self._read(rank)
        if about is None:
            beat, since = self._heard.setdefault(rank, (0, now))
        else:
            self._peers[rank] = about
            if told := _error_of(rank, about):
                return told
            beat, since = self._heard.get(rank, (0, now))
            if about["beat"] != beat or about.get("done"):
                self._heard[rank] = (about["beat"], now)
                self._waited_for.discard(rank)
                return ""
        if 0 < self._silent_seconds < now - since:
            if about is not None and _in_debugger(about):
                self._wait_for(rank, about)
                return ""
            where = (
                "has never been heard of"
                if about is None
                else f"(process {about['pid']} on {about['host']}) was last heard during {about['doing']}"
            )
            return f"rank {rank} {where} and has been silent for {now - since:.0f} seconds"
        return ""

    def _wait_for(self, rank: int, about: dict[str, Any]) -> None:
        """A silent rank is in a debugger: say so once."""
        if rank not in self._waited_for:
            self._waited_for.add(rank)
            print(
                f"lowtide: rank {rank} (process {about['pid']} on {about['host']}) is in a debugger: waiting "
                "for it",
                file=sys.stderr,
                flush=True,
            )

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._prefix}/{rank}"
        with self._lock:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _last_words(self, rank: int) -> str:
        """What a rank that is gone said at last: that it is done, or its error."""
        with contextlib.suppress(RuntimeError):
            about = self._read(rank)
            if about is not None:
                self._peers[rank] = about
                return _error_of(rank, about)
        return ""


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
    return about["machine"] == machine() and not lives(about["pid"])


def _in_debugger(about: dict[str, Any]) -> bool:
    """Whether a rank said that it has a debugger, or has got one since on this machine."""
    return bool(about.get("debugged")) or (about["machine"] == machine() and debugged(about["pid"]))


def _error_of(rank: int, about: dict[str, Any]) -> str:
    """The error that a rank ended with, or empty; where it ended because of another rank, that one's."""
    failed: str = about.get("failed", "")
    if failed.startswith(_AFTER):
        return failed.removeprefix(_AFTER)
    return f"rank {rank} failed during {about['doing']}: {failed}" if failed else ""


def _end(message: str) -> None:
    print(f"lowtide: {message}", file=sys.stderr, flush=True)
    os._exit(1)
