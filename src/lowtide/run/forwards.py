"""The forwards of one step, where it has several: those of the micro-batches of a pipeline's stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Around = Callable[[], AbstractContextManager[Any]]
"""Makes what is around one forward."""


class Forwards:
    """Puts something around each forward of a step that has several; everything else that runs in the step
    (losses, backwards, what is sent) is outside of it.

    Args:
        owners: the objects whose method runs one forward.
        method: its name.

    Example:
        >>> stage = type("Stage", (), {"run": lambda self, x: 2 * x})()
        >>> forwards = Forwards([stage], "run")
        >>> with forwards.within(lambda: print("begins") or nullcontext()):
        ...     stage.run(4)
        begins
        8
    """

    def __init__(self, owners: Sequence[Any], method: str) -> None:
        self._around: Around = nullcontext
        self._owners, self._method = list(owners), method
        for owner in self._owners:
            setattr(owner, method, self._wrapped(getattr(owner, method)))

    def _wrapped(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._around():
                return own(*args, **kwargs)

        return forward

    @contextmanager
    def within(self, around: Around) -> Iterator[None]:
        """In the block, each forward runs within what ``around()`` makes."""
        self._around = around
        try:
            yield
        finally:
            self._around = nullcontext

    def remove(self) -> None:
        """Give the owners their own methods back."""
        for owner in self._owners:
            owner.__dict__.pop(self._method, None)
