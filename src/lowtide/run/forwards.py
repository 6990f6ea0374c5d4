"""What runs within a step: its forwards, where it has several, and calls of compiled submodules.

`Forwards` puts a recorder around each forward of a pipeline's micro-batches, `left_alone` takes it off around
calls of compiled submodules, each of which is one opaque operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from lowtide import private
from lowtide.interception import unseen

Around = Callable[[], AbstractContextManager[Any]]
"""Makes what is around one forward."""

Observer = Callable[[Callable[[], Any]], Any]
"""Makes a call whose operations nobody sees."""


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
            setattr(owner, method, self._wrap(getattr(owner, method)))

    def _wrap(self, own: Callable[..., Any]) -> Callable[..., Any]:
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


class _Unrecorded:
    """A compiled call whose operations are not intercepted."""

    def __init__(self, call: Callable[..., Any], observer: Observer | None) -> None:
        self.call = call
        self.observer = observer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with unseen():
            if self.observer is None:
                return self.call(*args, **kwargs)
            return self.observer(lambda: self.call(*args, **kwargs))


@contextmanager
def left_alone(modules: Iterable[torch.nn.Module], observer: Observer | None = None) -> Iterator[None]:
    """Within the block, operations of compiled modules are not intercepted.

    Such a call is one opaque operation: what it returns and what it saves is kept.
    """
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    for module in filter(private.is_compiled, modules):
        name = private.compiled_call(module)
        call = module.__dict__.get(name)
        if call is not None and not isinstance(call, _Unrecorded):
            module.__dict__[name] = _Unrecorded(call, observer)
            changed.append((module, name, call))
    try:
        yield
    finally:
        for module, name, call in changed:
            module.__dict__[name] = call
