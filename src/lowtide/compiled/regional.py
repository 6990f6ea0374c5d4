"""Regional compilation: the blocks of a model that are compiled one by one."""

from __future__ import annotations

import torch
from torch import nn

from lowtide.errors import PlanError
from lowtide.private import is_compiled


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that regional compilation compiles: those that are compiled already, else those that repeat.

    Blocks repeat where a ``ModuleList`` or ``Sequential`` holds several modules of one class with parameters;
    of lists within such blocks none counts.

    Raises:
        PlanError: there are none.
    """
    compiled = [block for _, block in model.named_modules() if block is not model and is_compiled(block)]
    found = compiled or _repeated(model)
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no blocks that repeat: compile those that you mean "
            "(block.compile()) before lowtide.compile(..., regional=True), or leave regional out"
        )
    return found


def _repeated(module: torch.nn.Module) -> list[torch.nn.Module]:
    found: list[torch.nn.Module] = []
    for child in module.children():
        inner = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        parts = [one for one in inner if next(one.parameters(), None) is not None]
        if len(parts) > 1 and len({type(one) for one in parts}) == 1 and next(parts[0].children(), None):
            found += parts
        else:
            found += _repeated(child)
    return found
