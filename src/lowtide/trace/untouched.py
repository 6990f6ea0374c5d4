"""Run a step and leave no trace of it: random states, gradients, buffers, and what modules hold."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lowtide import private


@contextmanager
def untouched(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Afterwards gradients, buffers, parameters' data, module attributes and random states are what they
    were.
    """
    parameters = list(dict.fromkeys(p for root in modules for p in root.parameters()))
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters if p.is_leaf]
    buffers = [(buffer, buffer.detach().clone()) for root in modules for buffer in root.buffers()]
    try:
        with same_random(gpus_of(modules)), same_attributes(modules):
            yield
    finally:
        with torch.no_grad():
            for parameter, gradient, copy in gradients:
                if gradient is not None and copy is not None:
                    gradient.copy_(copy)
                parameter.grad = gradient
            for buffer, copy in buffers:
                if not _same(buffer, copy):
                    buffer.copy_(copy)


class Gradients:
    """The gradients that parameters of some modules have now, to see whether more arrive."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._before = [(p, p.grad, _version(p.grad)) for root in modules for p in root.parameters()]

    def have_arrived(self) -> bool:
        """Whether any parameter has another gradient than it had."""
        return any(p.grad is not grad or _version(p.grad) != seen for p, grad, seen in self._before)


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


@contextmanager
def same_attributes(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Afterwards every module has the attributes that it had, and its containers (tables of parameters, hooks
    and submodules included) hold what they held.

    A module that caches tensors on itself keeps none of them; one that installs hooks at its first step and
    notes that it did has neither the hooks nor the note.
    """
    everyone = dict.fromkeys(module for root in modules for module in root.modules())
    before = [(module, dict(module.__dict__), _contents(module)) for module in everyone]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, items in contents:
                if isinstance(container, list):
                    container[:] = items
                else:
                    container.clear()
                    container.update(items)


def _contents(module: torch.nn.Module) -> list[tuple[Any, Any]]:
    return [(item, item.copy()) for item in module.__dict__.values() if isinstance(item, (dict, list, set))]


def without_history(arguments: Any) -> Any:
    """The same arguments with tensors that have no history: a backward ends there."""

    def alone(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad) if tensor.requires_grad else tensor

    return private.tree_map_only(torch.Tensor, alone, arguments)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return torch.equal(a, b)
    except RuntimeError:
        return False


# ---- random states ------------------------------------------------------------------------------


@contextmanager
def same_random(devices: Sequence[int] = ()) -> Iterator[None]:
    """Afterwards the random states of PyTorch, of NumPy and of Python are what they were: models draw masks
    and layers to leave out from all.

    Args:
        devices: the GPUs whose generators are put back, too.

    Example:
        >>> import random
        >>> random.seed(1)
        >>> with same_random():
        ...     drawn = random.random()
        >>> drawn == random.random()
        True
    """
    state, numbers = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)


def generator_state(device: torch.device, generator: torch.Generator | None) -> bytes:
    """The random state that an operation on ``device`` is about to use. It lies outside the memory that the
    budget is about.
    """
    if generator is not None:
        state = generator.get_state()
    elif device.type == "cpu":
        state = torch.default_generator.get_state()
    else:
        state = torch.get_device_module(device.type).get_rng_state(device)
    return state.numpy().tobytes()


def set_generator_state(device: torch.device, generator: torch.Generator | None, state: bytes) -> None:
    """Set what `generator_state` reads."""
    tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if generator is not None:
        generator.set_state(tensor)
    elif device.type == "cpu":
        torch.default_generator.set_state(tensor)
    else:
        torch.get_device_module(device.type).set_rng_state(tensor, device)


def gpus_of(modules: Sequence[torch.nn.Module]) -> list[int]:
    """The GPUs on which the modules have parameters."""
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    return sorted(device.index for device in devices if device.type == "cuda" and device.index is not None)
