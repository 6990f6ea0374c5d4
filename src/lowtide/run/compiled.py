"""Leave the recorder around calls of compiled submodules: a dispatch mode would make them fall back to eager for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import private


@contextmanager
def left_alone(model: torch.nn.Module, mode: TorchDispatchMode) -> Iterator[None]:
    """For the length of the block, ``mode`` is off the stack whenever a compiled submodule of ``model`` runs.

    Such a call is one opaque operation: what it returns and what it saves stays.
    """
    compiled = [module for module in model.modules() if private.is_compiled(module)]
    if not compiled:
        yield
        return
    taken: list[list[Any]] = []
    removes = []
    for module in compiled:
        removes.append(module.register_forward_pre_hook(lambda *_: taken.append(private.leave_mode(mode))))
        removes.append(module.register_forward_hook(lambda *_: private.enter_modes(taken.pop()), always_call=True))
    try:
        yield
    finally:
        for handle in removes:
            handle.remove()
