"""Calls and results described: what a step's operations look like without their tensors, and which tensors
lie inside a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lowtide.meter.resident import plain_parts
from lowtide.ops import has_plain_storage, is_sparse, is_wrapper
from lowtide.trace.costs import OpSpec, TensorSpec

Signature = tuple[Any, ...]


def is_wrapper_type(kind: type) -> bool:
    """Whether tensors of this type hold other tensors."""
    return kind is not torch.Tensor and hasattr(kind, "__tensor_flatten__")


def plain_leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors inside a tensor, itself when it is plain."""
    if is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # a DTensor names its mesh, too
                yield from plain_leaves(inner)
    elif is_sparse(tensor):
        yield from plain_parts(tensor)
    elif has_plain_storage(tensor):
        yield tensor


def tensors_inside(result: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in what a step returned, in containers and in the attributes of an output object."""
    if isinstance(result, torch.Tensor):
        yield from plain_leaves(result)
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from tensors_inside(item)
    elif isinstance(result, dict):
        for item in result.values():
            yield from tensors_inside(item)
    elif hasattr(result, "__dict__"):
        for item in vars(result).values():
            if isinstance(item, (torch.Tensor, tuple, list, dict)):
                yield from tensors_inside(item)


def _describe(item: Any, keys: dict[int, int]) -> Any:
    """An argument with tensors described; ``keys`` numbers the storages of the call in order of
    appearance.
    """
    if isinstance(item, torch.Tensor):
        if not has_plain_storage(item):
            return TensorSpec(0, item.dtype, tuple(item.shape), (), 0, item.device, -1)
        storage = item.untyped_storage()
        number = keys.setdefault(private.storage_address(storage), len(keys))
        shape, offset = tuple(item.shape), int(item.storage_offset())
        return TensorSpec(storage.nbytes(), item.dtype, shape, item.stride(), offset, item.device, number)
    if isinstance(item, (tuple, list)):
        return tuple(_describe(part, keys) for part in item)
    if (
        isinstance(
            item, (int, float, str, bool, torch.dtype, torch.device, torch.layout, torch.memory_format)
        )
        or item is None
    ):
        return item
    return repr(item) if not isinstance(item, torch.Generator) else None


def signature_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, OpSpec]:
    """A hashable key that equal calls share, and the same call with tensors described instead of held."""
    keys: dict[int, int] = {}

    described = tuple(_describe(item, keys) for item in args)
    named = {name: _describe(item, keys) for name, item in kwargs.items()}
    signature = (func, described, tuple(sorted(named.items())))
    return signature, OpSpec(func, described, named)
