"""What makes two steps the same kind of step: what a plan is keyed by."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


class StepKey(NamedTuple):
    """Shapes and dtypes of the inputs, and the modes that change what a step does or what it allocates."""

    inputs: tuple[Any, ...]
    structure: str
    training: int
    autocast: tuple[Any, ...]
    trainable: int
    gradients: int

    def difference(self, other: StepKey) -> str:
        """In words, what this kind of step has that ``other`` has not."""
        names = {
            "inputs": "the inputs have other shapes",
            "structure": "the arguments are arranged otherwise",
            "training": "modules changed between training and evaluation",
            "autocast": "autocast changed",
            "trainable": "other parameters are trainable",
            "gradients": "gradients are there that were not, or the other way round",
        }
        found = [text for name, text in names.items() if getattr(self, name) != getattr(other, name)]
        return " and ".join(found) or "nothing changed"


def _leaf(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return (
            tuple(item.shape),
            item.dtype,
            item.device.type,
            item.requires_grad,
            item.stride() if item.layout is torch.strided else None,
        )
    if isinstance(item, (int, float, str, bool, type(None))):
        return item
    return type(item).__qualname__


def step_key(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepKey:
    """The key of a step of ``model`` with these arguments, now."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    parameters = list(model.parameters())
    device = parameters[0].device.type if parameters else "cpu"
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else (False,)
    return StepKey(
        inputs=tuple(_leaf(leaf) for leaf in leaves),
        structure=str(structure),
        training=hash(tuple(module.training for module in model.modules())),
        autocast=autocast,
        trainable=hash(tuple(parameter.requires_grad for parameter in parameters)),
        gradients=hash(tuple(parameter.grad is not None for parameter in parameters)),
    )
