"""Leave the recorder where its script says that nothing is recorded: no dispatch goes through Python
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.interception import interceptors
from lowtide.run.follow import Follower
from lowtide.run.rehearse import Mark, Script, Staged, wrapped


class Switch:
    """Takes a recorder off the stack of modes and puts it back, mark by mark.

    Args:
        recorder: it.
        marks: where.
    """

    def __init__(self, recorder: Follower, marks: tuple[Mark, ...]) -> None:
        self._recorder = recorder
        self._marks = marks
        self._next = 0
        self._on = True
        self._depth = 0

    def crosses(self, module: torch.nn.Module, ends: bool) -> None:
        """The step is at the beginning or the end of a module."""
        if self._next < len(self._marks) and self._recorder.follows:
            expected, at_end, on, advance = self._marks[self._next]
            if expected is module and at_end is ends:
                self._next += 1
                if on is self._on:
                    return
                if not on:
                    if interceptors()[-1:] == [self._recorder]:  # else a scope's recorder is on top
                        self._recorder.stop()
                        self._depth = len(interceptors())
                        self._on = False
                    return
                if self.back():
                    self._recorder.skip(advance)
                    return
        self._marks = ()
        self._recorder.depart()
        self.back()

    def back(self) -> bool:
        """Put the recorder back if it is off; impossible where another recorder has been started since."""
        if not self._on and len(interceptors()) == self._depth:
            self._recorder.start()
            self._on = True
        return self._on


@contextmanager
def quiet(script: Script, recorder: Follower) -> Iterator[None]:
    """For the length of the block, ``recorder`` is off where the script says so."""
    switch = Switch(recorder, script.marks)

    def around(module: torch.nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda forward: Staged(forward, lambda ends: switch.crosses(module, ends))

    with wrapped(list({module: None for module, *_ in script.marks}), around) as all_of_them:
        if not all_of_them:
            recorder.depart()
        try:
            yield
        finally:
            switch.back()
