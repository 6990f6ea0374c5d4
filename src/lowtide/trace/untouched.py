"""Run a step and leave no trace of it: random states, gradients, buffers, and what modules hold."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lowtide import accelerator, private


@contextmanager
def untouched(modules: Sequence[torch.nn.Module]) -> Iterator[Gradients]:
    """Afterwards gradients, buffers, parameters' data, module attributes and random states are what they
    were; so are the gradients of other tensors that the block notes.
    """
    gradients = Gradients(modules)
    buffers = [(buffer, buffer.detach().clone()) for root in modules for buffer in root.buffers()]
    try:
        with same_random(gpus_of(modules)), same_attributes(modules):
            yield gradients
    finally:
        with torch.no_grad():
            gradients.restore()
            for buffer, copy in buffers:
                if not _same(buffer, copy):
                    buffer.copy_(copy)


class Gradients:
    """The gradients that trainable tensors have now, to see whether more arrive, and to undo that.

    Args:
        modules: whose parameters these are; `note` adds others.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None, int, torch.Tensor | None]] = {}
        for parameter in (parameter for root in modules for parameter in root.parameters()):
            self.note(parameter)

    def note(self, tensor: torch.Tensor) -> None:
        """The gradient of a tensor, or of the one that it is a view of, if that is trainable."""
        leaf = private.base_of(tensor)
        if leaf.requires_grad and leaf.is_leaf and id(leaf) not in self._before:
            gradient = leaf.grad
            copy = None if gradient is None else gradient.clone()
            self._before[id(leaf)] = (leaf, gradient, _version(gradient), copy)

    def have_arrived(self) -> bool:
        """Whether any tensor has another gradient than it had."""
        before = self._before.values()
        return any(t.grad is not grad or _version(t.grad) != version for t, grad, version, _ in before)

    def restore(self) -> None:
        """Give each tensor the gradient that it had, and let go of them all: who holds this would hold two
        sets of gradients.
        """
        for tensor, gradient, _, copy in self._before.values():
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
            tensor.grad = gradient
        self._before.clear()


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else private.version(tensor)


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
        accelerator.set_random_state(device, tensor)


def gpus_of(modules: Sequence[torch.nn.Module]) -> list[int]:
    """The GPUs on which the modules have parameters."""
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    return sorted(
        device.index for device in devices if accelerator.is_accelerator(device) and device.index is not None
    )
