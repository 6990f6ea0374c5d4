"""Hooks that modules and optimizers hold, as tables.

Seen in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def forward_pre_hooks(module: torch.nn.Module) -> list[Any]:
    """What runs before a module's forward, in that order."""
    return list(module._forward_pre_hooks.values())


def load_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What an optimizer asks before it loads a state dict."""
    return list(optimizer._optimizer_load_state_dict_pre_hooks.values())


def load_post_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What an optimizer calls when it has loaded a state dict."""
    return list(optimizer._optimizer_load_state_dict_post_hooks.values())


_REPLICATE = "_replicate_for_data_parallel"


def replicate_by(module: torch.nn.Module, replicate: Callable[[], torch.nn.Module] | None) -> None:
    """What `torch.nn.DataParallel` calls, on several devices, to copy a module; ``None`` is PyTorch's own."""
    module.__dict__.pop(_REPLICATE, None)
    if replicate is not None:
        module.__dict__[_REPLICATE] = replicate
