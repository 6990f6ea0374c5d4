"""Progress of what takes seconds: Python's logging underneath, a bar on an interactive terminal, lines
elsewhere (a notebook, a file), one line at the end.

>>> with working("planning", "planned") as work:
...     for operation in work.each("timing operations", ["mm", "gelu"]):
...         pass  # whatever takes long
...     work.done("60 % of the memory, +12 % time")

Everything goes to the logger ``lowtide``: what is being done at level DEBUG; the line at the end, and one
when work has taken a second and is not over, at level INFO. The bar is for people: it is there where standard
error is a terminal, once the work has taken a second. It needs no thread, so that it disturbs nothing that
is timed. Where standard error is no terminal, work that takes 5 seconds says so in a line, again after 10,
20, 30, ..., and at its end.

To keep it quiet: ``progress=False`` where a function takes that, ``LOWTIDE_PROGRESS=0`` in the
environment, or `mute` around a piece of code. A level above INFO on the logger turns all of it off.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

from lowtide.errors import LowtideError

T = TypeVar("T")

Audience = Literal["terminal", "lines", "nowhere"]

log = logging.getLogger("lowtide")

AFTER_SECONDS = 1.0
"""Work that is over sooner shows nothing on a terminal, and only its end in the log."""

LINE_SECONDS = 5.0
"""The same where standard error is no terminal."""

EVERY_SECONDS = 10.0
"""There, between later lines."""

_REFRESH_SECONDS = 0.1

_current: ContextVar[Work | None] = ContextVar("lowtide_progress", default=None)


class Work:
    """Something that takes long. Made by `working`.

    Args:
        what: what it is, as in "planning".
        past: what it is called when it is over, as in "planned".
        place: who is told.
    """

    def __init__(self, what: str, past: str, place: Audience) -> None:
        self.what, self.past = what, past
        self.depth = 0
        self._place: Audience = place
        self._begin = self._latest = time.perf_counter()
        self._next_line, self._latest_line = LINE_SECONDS, -LINE_SECONDS
        self._text, self._count, self._total = what, 0, 0
        self._line = ""
        self._logged = False
        self._bar: Any = None

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._begin

    def tick(self) -> None:
        """Called now and then while one piece is being done, so that long ones are not silent."""
        self._show()

    def say(self, text: str, total: int = 0, silent: bool = False) -> None:
        """What is being done from now on.

        Args:
            text: what it is.
            total: in how many pieces, where that is known.
            silent: it may take many seconds without a tick, as an import or a compiler does; so where there
                is no terminal, too, this is said before.
        """
        self._text, self._count, self._total = text, 0, total
        log.debug("%s: %s", self.what, text)
        if silent and self._place == "lines" and self.seconds - self._latest_line >= LINE_SECONDS:
            self._next_line = 0.0
            self._show_line(self.seconds)
        self._show(at_once=True)

    def each(self, text: str, items: Sequence[T]) -> Iterator[T]:
        """The items, each counted when the next one is asked for."""
        self.say(text, len(items))
        for item in items:
            yield item
            self._count += 1
            self._show()

    def done(self, result: str) -> None:
        """What came of it, for the line at the end; only the outermost work has one."""
        if not self.depth:
            self._line = result

    def _show(self, at_once: bool = False) -> None:
        now = time.perf_counter()
        if now - self._begin < AFTER_SECONDS or not (at_once or now - self._latest >= _REFRESH_SECONDS):
            return
        if not self._logged and self.what:
            self._logged = True
            log.info("%s, %.1f s so far: %s", self.what, now - self._begin, self._text)
        self._latest = now
        if self._place == "lines":
            self._show_line(now - self._begin)
        if self._place != "terminal":
            return
        if self._bar is None:
            self._bar = _bar()
            self._bar.add_task("")
        (task,) = self._bar.task_ids
        total = self._total or None
        self._bar.update(task, description=f"lowtide: {self._text}", completed=self._count, total=total)
        self._bar.start()  # does nothing where it has begun
        self._bar.refresh()

    def _show_line(self, seconds: float) -> None:
        """A line, where one is due after so many seconds."""
        if seconds < self._next_line:
            return
        self._latest_line = seconds
        self._next_line = max(LINE_SECONDS, EVERY_SECONDS * ((seconds + 2) // EVERY_SECONDS + 1))
        pieces = f" ({self._count} of {self._total})" if self._total else ""
        so_far = f", {seconds:.0f} s so far" if seconds >= AFTER_SECONDS else " ..."
        _print(f"{self._text}{pieces}{so_far}")

    def close(self, failed: bool) -> None:
        """Take the bar away, and tell the line at the end unless it failed."""
        if self._bar is not None:
            self._bar.stop()
        if self._line and not failed:
            _tell_end(self.past, self.seconds, self._line, self._place)


def took(past: str, seconds: float, result: str, progress: bool | None = None) -> None:
    """Tell of work that is over.

    Args:
        past: what it is called, as in "planned".
        seconds: that it took.
        result: what came of it.
        progress: whether anybody is told; ``None`` goes by the environment.
    """
    _tell_end(past, seconds, result, place(progress))


def _tell_end(past: str, seconds: float, result: str, place: Audience) -> None:
    text = f"{past} in {seconds:.1f} s: {result}"
    log.info("%s", text)
    after = {"terminal": AFTER_SECONDS, "lines": LINE_SECONDS, "nowhere": float("inf")}[place]
    if seconds >= after:
        _print(text)


def _print(text: str) -> None:
    """A line on standard error, where the log does not have it already."""
    if not log.isEnabledFor(logging.INFO):
        print(f"lowtide: {text}", file=sys.stderr, flush=True)


@contextmanager
def working(what: str, past: str, progress: bool | None = None) -> Iterator[Work]:
    """Show what the block does. Inside another such block it is a part of that.

    Args:
        what: "planning", say.
        past: "planned", for the line at the end.
        progress: whether anybody is told; ``None`` goes by the environment.
    """
    outer = _current.get()
    if outer is not None:
        outer.depth += 1
        try:
            yield outer
        finally:
            outer.depth -= 1
        return
    work = Work(what, past, place(progress))
    token, failed = _current.set(work), True
    try:
        yield work
        failed = False
    finally:
        _current.reset(token)
        work.close(failed)


@contextmanager
def mute() -> Iterator[None]:
    """Nothing in the block is shown, whatever it asks for."""
    work = Work("", "", "nowhere")
    work.depth = 1  # so that nothing in it has a line of its own
    token = _current.set(work)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Work:
    """The work that this thread is showing; where there is none, a `Work` that shows nothing."""
    return _current.get() or Work("", "", "nowhere")


def place(progress: bool | None = None) -> Audience:
    """Who is told: a person at a terminal, by a bar; who reads standard error later, by lines; or nobody,
    where it was turned off, and outside of the main thread of the first process.

    Raises:
        LowtideError: ``LOWTIDE_PROGRESS`` is neither 0 nor 1.
    """
    setting = os.environ.get("LOWTIDE_PROGRESS", "1")
    if setting not in ("0", "1"):
        raise LowtideError(f"LOWTIDE_PROGRESS is {setting!r}: 0 turns progress off, 1 is as without it")
    if progress is False or (progress is None and setting == "0"):
        return "nowhere"
    if log.level > logging.INFO or os.environ.get("RANK", "0") != "0" or sys.stderr is None:
        return "nowhere"
    if threading.current_thread() is not threading.main_thread():
        return "nowhere"
    return "terminal" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else "lines"


def _bar() -> Any:
    """A bar that goes when it is over, and is drawn only when it is told something."""
    from rich.console import Console  # takes a tenth of a second, which only a terminal has to wait for
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(file=sys.stderr), transient=True, auto_refresh=False)
