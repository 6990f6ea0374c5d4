"""What makes two steps the same kind of step: what a plan is keyed by."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from lowtide import private
from lowtide.meter.resident import gradient_of


class StepKey(NamedTuple):
    """Shapes and dtypes of the inputs, and the modes that change what a step does or what it allocates.

    Numbers among the arguments (a time step, the number of items in a batch) are no part of it: they change
    from step to step.
    """

    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[Any, ...]
    structure: str
    training: int
    autocast: tuple[Any, ...]
    trainable: int
    parameters: int
    gradients: int

    def fits_in(self, other: StepKey) -> bool:
        """Whether a step with this key is one with ``other``, but for being smaller in some dimensions."""
        if not self.differs_in_size(other):
            return False
        return all(
            len(own) == len(theirs) and all(a <= b for a, b in zip(own, theirs, strict=True))
            for own, theirs in zip(self.shapes, other.shapes, strict=True)
        )

    def differs_in_size(self, other: StepKey) -> bool:
        """Whether nothing but how large the inputs are tells the two apart."""
        return self[1:] == other[1:]

    def elements(self) -> int:
        """Elements of all inputs together."""
        return sum(map(math.prod, self.shapes))

    def without_gradients(self) -> StepKey:
        """The same for a step before which no gradients stood."""
        return self._replace(gradients=0)


def _leaf(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        order = (
            tuple(sorted(range(item.dim()), key=lambda at: -item.stride(at)))
            if item.layout is torch.strided
            else None
        )
        return (item.dim(), item.dtype, item.device.type, item.requires_grad, item.layout, order)
    if isinstance(item, (str, bool, type(None))):
        return item
    return type(item).__qualname__


class Members:
    """What a model is made of now; every step asks once.

    Args:
        model: it.

    Attributes:
        modules, parameters: all of them, each once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())

    def are_lazy(self) -> bool:
        """Whether some of it is not initialized yet."""
        lazy: list[Any] = [one for one in self.modules if isinstance(one, LazyModuleMixin)]  # pyright: ignore
        return any(one.has_uninitialized_params() for one in lazy)

    @property
    def compiled(self) -> list[torch.nn.Module]:
        """The modules whose calls `torch.compile` made."""
        return [module for module in self.modules if private.is_compiled(module)]

    @property
    def device(self) -> torch.device:
        """Where the first parameter lies."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")


def step_key(members: Members, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepKey:
    """The key of a step of a model with these members and arguments, now."""
    leaves, structure = private.tree_flatten((args, kwargs))
    device = members.device.type
    autocast = (
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        if torch.is_autocast_enabled(device)
        else (False,)
    )
    standing = tuple(gradient_of(one) is not None for one in members.parameters)
    return StepKey(
        shapes=tuple(
            tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_nested
        ),
        inputs=tuple(
            _leaf(leaf) if not (isinstance(leaf, torch.Tensor) and leaf.is_nested) else "nested"
            for leaf in leaves
        ),
        structure=str(structure),
        training=hash(tuple(module.training for module in members.modules)),
        autocast=autocast,
        trainable=hash(tuple(one.requires_grad for one in members.parameters)),
        # a model may be cast, or its embeddings resized, between two steps
        parameters=hash(tuple((one.dtype, one.nbytes) for one in members.parameters)),
        gradients=hash(standing) if any(standing) else 0,
    )
