"""Tell the user what takes long: nothing for two seconds, then one line that changes."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Self


class Notice:
    """Shows the latest `say` on standard error once the block has lasted longer than ``after_seconds``.

    Args:
        title: what the line begins with.
        after_seconds: how long to stay silent.
    """

    def __init__(self, title: str, after_seconds: float = 2.0) -> None:
        self._title = title
        self._text = ""
        self._shown = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(after_seconds, self._show)
        self._timer.daemon = True

    def say(self, text: str) -> None:
        """What is being done from now on."""
        with self._lock:
            self._text = text
            if self._shown:
                self._print()

    def _show(self) -> None:
        with self._lock:
            self._shown = True
            self._print()

    def _print(self) -> None:
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{self._title}: {self._text} ...".ljust(78), end=end, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._shown and sys.stderr.isatty():
            print(" " * 78, end="\r", file=sys.stderr, flush=True)
