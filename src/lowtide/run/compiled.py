"""Leave the recorder around calls of compiled submodules: a dispatch mode would make them fall back to eager for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private


class _Outside:
    """A compiled call that is made outside lowtide's dispatch modes."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outermost = next((mode for mode in private.dispatch_modes() if hasattr(mode, "region")), None)
        if outermost is None:
            return self.call(*args, **kwargs)
        taken = private.leave_mode(outermost)
        try:
            return self.call(*args, **kwargs)
        finally:
            private.enter_modes(taken)


@contextmanager
def left_alone(model: torch.nn.Module) -> Iterator[None]:
    """For the length of the block, compiled submodules of ``model`` run outside lowtide's dispatch modes.

    Such a call is one opaque operation: what it returns and what it saves stays.
    """
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    for module in model.modules():
        if private.is_compiled(module):
            name = private.compiled_call(module)
            call = module.__dict__.get(name)
            if call is not None and not isinstance(call, _Outside):
                module.__dict__[name] = _Outside(call)
                changed.append((module, name, call))
    try:
        yield
    finally:
        for module, name, call in changed:
            module.__dict__[name] = call
