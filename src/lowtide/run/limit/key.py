"""What a step begins with, and its cache key: steps with equal keys share a plan.

In: a model and a call's arguments (`Inputs`). Out: the model's parts as they are now (`Members`), and the key
(`StepKey`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from lowtide import private
from lowtide.extension import Extension
from lowtide.meter.resident import storages
from lowtide.run.record.engine import engine

# read of all modules or parameters in every step, without a call of Python for each
_TRAINING, _TRAINS, _TYPE = attrgetter("training"), attrgetter("requires_grad"), attrgetter("dtype", "nbytes")


class StepKey(NamedTuple):
    """Shapes and dtypes of the inputs, and the modes that change what a step does or what it allocates.

    Numbers among the arguments (a time step, the number of items in a batch) are left out: they change from
    step to step.
    """

    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[Any, ...]
    structure: str
    training: int
    autocast: Any
    trainable: int
    parameters: int
    gradients: int
    extensions: int = 0

    def fits_in(self, other: StepKey) -> bool:
        """Whether this is the key of the same step as ``other``, only smaller in some dimensions."""
        if not self.is_alike_but_for_size(other):
            return False
        return all(
            len(own) == len(theirs) and all(a <= b for a, b in zip(own, theirs, strict=True))
            for own, theirs in zip(self.shapes, other.shapes, strict=True)
        )

    def is_alike_but_for_size(self, other: StepKey) -> bool:
        """Whether the two keys are equal but for the sizes of the inputs."""
        return self[1:] == other[1:]

    def elements(self) -> int:
        """How many elements all inputs have together."""
        return sum(map(math.prod, self.shapes))

    def without_gradients(self) -> StepKey:
        """The key of the same step when no gradients exist before it."""
        return self._replace(gradients=0)


def _leaf(item: Any) -> Any:
    """The form of one argument: equal for two that differ only in a tensor's size or a number's value."""
    if isinstance(item, torch.Tensor):
        if item.is_nested:
            return "nested", item.layout
        strides = item.stride() if item.layout is torch.strided else ()
        order = tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))
        return item.dim(), item.dtype, item.device.type, item.requires_grad, item.layout, order
    if isinstance(item, (str, bool, type(None))):
        return item
    return type(item).__qualname__


def _shapes(leaves: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """The sizes of the tensors among the arguments."""
    shapes = list[tuple[int, ...]]()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            shapes += _shapes_of_nested(leaf) if leaf.is_nested else (tuple(leaf.shape),)
    return tuple(shapes)


def _shapes_of_nested(tensor: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """The sizes of what a nested tensor, whose shape has no numbers, is made of."""
    if tensor.layout is torch.strided:  # it has no shape, and PyTorch aborts where asked
        yield (tensor.numel(),)
    else:
        parts, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        yield from (tuple(getattr(tensor, name).shape) for name in parts)


class Members:
    """The modules, parameters and buffers of a model now, found in one walk without names.

    Every step takes such a walk, and with names it would take ten times as long.

    Args:
        model: the model.

    Attributes:
        modules, parameters, buffers: all of them, modules once.
        lazy: whether some parameters or buffers are not initialized yet.
        compiled: the modules whose calls `torch.compile` may have made.
        training: a byte for each module.
        device: the first parameter's device.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = modules = [model]
        seen: set[torch.nn.Module | None] = {model, None}
        parameters: list[torch.nn.Parameter | None] = []
        buffers: list[torch.Tensor | None] = []
        for module in modules:
            own = module.__dict__
            if "_parameters" in own:  # most have one of the three
                if there := own["_parameters"]:
                    parameters += there.values()
                if there := own["_buffers"]:
                    buffers += there.values()
                children = there.values() if (there := own["_modules"]) else ()
            else:  # TorchScript's modules keep them elsewhere
                parameters += module.parameters(recurse=False)
                buffers += module.buffers(recurse=False)
                children = module.children()
            for child in children:
                if child not in seen:
                    seen.add(child)
                    modules.append(child)
        self.parameters = [one for one in parameters if one is not None]
        self.buffers = [one for one in buffers if one is not None]
        tensors = (*self.parameters, *self.buffers)
        of_each_type = dict(zip(map(type, tensors), tensors, strict=True))
        self.lazy = any(map(torch.nn.parameter.is_lazy, of_each_type.values()))
        self.compiled = private.compiled_among(modules)
        self.training = bytes(map(bool, map(_TRAINING, modules)))
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")

    def parameter_states(self) -> tuple[bytes, bytes, int]:
        """For each parameter, as bytes, whether it is trainable, and whether it has a gradient; and a hash of
        their types and sizes. Only leaves are asked for a gradient: PyTorch warns for others.
        """
        return (
            bytes(map(_TRAINS, self.parameters)),
            bytes([one.is_leaf and one.grad is not None for one in self.parameters]),
            hash(tuple(map(_TYPE, self.parameters))),
        )

    def resident_bytes(self, more: Iterable[Any] = ()) -> int:
        """Bytes of the parameters, buffers and gradients, and of the tensors ``more``."""
        nbytes, others = engine().resident_bytes((*self.parameters, *self.buffers, *more), self.device)
        return nbytes + sum(s.nbytes() for s in storages(others)) if others else nbytes


class Inputs:
    """What a call of a limited model begins with.

    Args:
        model: the model.
        args, kwargs: of its forward.
        compiled: `torch.compile` is around the call and restores dispatch when it returns, so no interceptor
            sees the backward.
        extensions: of the limit.

    Attributes:
        begin: when the call began, by `time.perf_counter`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compiled: bool,
        extensions: Sequence[Extension] = (),
    ) -> None:
        self.begin = time.perf_counter()
        self._extensions = extensions
        self.args, self.kwargs, self.compiled = args, kwargs, compiled
        self._model = model

    @cached_property
    def members(self) -> Members:
        """The members of the model now."""
        return Members(self._model)

    @cached_property
    def _flat(self) -> tuple[list[Any], Any]:
        """The arguments without containers, and the containers."""
        return private.tree_flatten((self.args, self.kwargs))

    @cached_property
    def key(self) -> StepKey:
        """The key of the step."""
        keys = list[Hashable]()
        for extension in self._extensions:
            if (found := extension.key(self._model)) is not None:
                keys.append(found)
        members, (leaves, structure) = self.members, self._flat
        device = members.device.type
        trainable, gradients, types = members.parameter_states()
        return StepKey(
            shapes=_shapes(leaves),
            inputs=tuple(map(_leaf, leaves)),
            structure=str(structure),
            training=hash(members.training),
            autocast=torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            trainable=hash(trainable),
            # a model may be cast, or its embeddings resized, between two steps
            parameters=types,
            gradients=hash(gradients) if any(gradients) else 0,
            extensions=hash(tuple(keys)) if keys else 0,
        )

    def forget_key(self) -> None:
        """The model has changed, and with it the key of the step."""
        vars(self).pop("key", None)

    def resident_bytes(self, own: bool = False) -> int:
        """Bytes that are there before the step: of the model's parameters, buffers and gradients, and, unless
        only its ``own`` are asked for, of the tensors that the forward is given.
        """
        return self.members.resident_bytes(() if own else self._flat[0])

    @property
    def has_unkeyed_arguments(self) -> bool:
        """Whether something among the arguments has no part in the key: a number, or an object."""
        shown = (torch.Tensor, str, bool, type(None))
        return not all(isinstance(leaf, shown) for leaf in self._flat[0])
