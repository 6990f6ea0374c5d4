"""What a run says while it goes: a progress bar on a terminal, now and then a line elsewhere, or nothing."""

from __future__ import annotations

import math
import os
import statistics
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from lowtide.budget import format_bytes

NARROW = 80
"""Columns up to which the bar is a short one."""

LINES = 10
"""How many times a run reports itself where there is no terminal."""

STEPS_OF_A_RATE = 9
"""Of the latest steps the tokens per second that are shown are the median."""


def say(console: Console, text: str) -> None:
    """Print a line: folded between words at the width of a terminal, or where ``COLUMNS`` says; whole in a
    file, whose lines programs read.
    """
    folds = console.is_terminal or "COLUMNS" in os.environ
    console.print(text, highlight=False, soft_wrap=not folds)


class Progress:
    """A bar with loss, tokens per second and live peak on a terminal; a line now and then in a log.

    Args:
        console: where to; a quiet one, or none, hears nothing.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(quiet=True)
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._first = self._steps = 0
        self._rates: deque[float] = deque(maxlen=STEPS_OF_A_RATE)

    def start(self, first: int, steps: int, what: str) -> None:
        """The run of ``what`` begins after ``first`` of ``steps`` steps."""
        self._first, self._steps = first, steps
        say(self._console, what)

    def note(self, text: str) -> None:
        """Something was chosen that nobody asked for."""
        say(self._console, text)

    def step(self, done: int, loss: float, tokens_per_second: float, peak_bytes: int | None) -> None:
        """A step has ended; ``peak_bytes`` is the most live memory within it, if known."""
        if done - self._first == 2:  # the first step plans
            self._rates.clear()
        self._rates.append(tokens_per_second)
        rate = statistics.median(self._rates)  # a step that plans or reads data counts once
        peak = "not counted" if peak_bytes is None else format_bytes(peak_bytes)
        if self._console.is_terminal and not self._console.quiet:
            if self._bar is None:  # only now: planning shows its own progress during the first step
                self._bar = Bar(
                    BarColumn(bar_width=None if self._console.width > NARROW else 8),
                    MofNCompleteColumn(),
                    TextColumn(
                        "loss {task.fields[loss]:.2f} {task.fields[rate]:,.0f} tokens/s {task.fields[peak]}"
                    ),
                    TimeRemainingColumn(compact=True),
                    console=self._console,
                )
                self._task = self._bar.add_task(
                    "training", total=self._steps, completed=done, loss=loss, rate=rate, peak=peak
                )
                self._bar.start()
            assert self._task is not None
            self._bar.update(self._task, completed=done, loss=loss, rate=rate, peak=peak)
        elif done == self._first + 1 or done == self._steps or done % max(1, self._steps // LINES) == 0:
            text = f"step {done}/{self._steps}  loss {loss:.3f}  {rate:,.0f} tokens/s  peak {peak}"
            say(self._console, text)

    def evaluated(self, done: int, loss: float, bytes_per_token: float) -> None:
        """The validation loss per token after ``done`` steps."""
        bits = loss / math.log(2) / bytes_per_token
        say(self._console, f"step {done}/{self._steps}  validation {loss:.3f} ({bits:.2f} bits a byte)")

    def finish(self) -> None:
        """The last step has ended, or the run failed."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def comparing(self) -> None:
        """The plain and the planned step are measured now."""
        say(self._console, "measuring the plain and the planned step in turn ...")
