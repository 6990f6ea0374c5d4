"""A place in PyTorch where something stands in for something else, however many traces run at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


class Seam:
    """A block that several threads may be in: what it changes is changed by the first that enters, and back by the last that leaves.

    Args:
        change: makes the context in which it is changed.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[object]]) -> None:
        self._change = change
        self._users = 0
        self._lock = threading.Lock()
        self._stack = ExitStack()

    @contextmanager
    def open(self) -> Iterator[None]:
        """In the block it is changed."""
        with self._lock:
            if not self._users:
                self._stack.enter_context(self._change())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._stack.close()
