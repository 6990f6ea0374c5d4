"""Run a step and leave no trace of it: for `trace`, and for planning ahead of the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.trace.random_state import gpus_of, same_random


@contextmanager
def untouched(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Afterwards gradients, buffers, parameters' data, module attributes and random states are what they
    were.
    """
    everyone = list(dict.fromkeys(module for root in modules for module in root.modules()))
    parameters = list(dict.fromkeys(p for root in modules for p in root.parameters()))
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    buffers = [(buffer, buffer.detach().clone()) for root in modules for buffer in root.buffers()]
    attributes = [(module, dict(module.__dict__), _containers(module)) for module in everyone]
    try:
        with same_random(modules, gpus_of(modules)):
            yield
    finally:
        for module, before, contents in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)
            for container, items in contents:
                _refill(container, items)
        with torch.no_grad():
            for parameter, gradient, copy in gradients:
                if gradient is not None and copy is not None:
                    gradient.copy_(copy)
                parameter.grad = gradient
            for buffer, copy in buffers:
                if not _same(buffer, copy):
                    buffer.copy_(copy)


def apart(arguments: Any) -> Any:
    """The same arguments with tensors that have no history: a backward ends there."""

    def alone(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad) if tensor.requires_grad else tensor

    return private.tree_map_only(torch.Tensor, alone, arguments)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return torch.equal(a, b)
    except RuntimeError:
        return False


def _containers(module: torch.nn.Module) -> list[tuple[Any, Any]]:
    return [(item, item.copy()) for item in module.__dict__.values() if isinstance(item, (dict, list, set))]


def _refill(container: Any, items: Any) -> None:
    if isinstance(container, list):
        container[:] = items
    else:
        container.clear()
        container.update(items)
