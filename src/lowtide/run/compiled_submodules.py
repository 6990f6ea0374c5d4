"""Turn the recorder off around calls of compiled submodules: each call is one opaque operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.interception import unseen

Observer = Callable[[Callable[[], Any]], Any]
"""Makes a call whose operations nobody sees."""


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
