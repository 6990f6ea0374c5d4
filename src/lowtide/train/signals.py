"""Ctrl-C and SIGTERM as a request to end a run in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody asked the run to stop; true after the first signal."""

    def __init__(self) -> None:
        self._asked = False

    def __bool__(self) -> bool:
        return self._asked

    def ask(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: the first asks to stop after this step, the second stops at once."""
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn Ctrl-C and SIGTERM into a request to finish the step, save and stop. Outside the main thread
    nothing is caught.
    """
    stop = StopRequest()
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stop.ask)
    except ValueError:
        pass
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
