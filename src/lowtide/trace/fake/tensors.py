"""Lend modules fake tensors for the length of a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.ops import OpInfo
from lowtide.private import FakeTensor
from lowtide.trace.untouched import same_attributes

SMALL_BYTES = 1 << 24
"""Tensors of integers and truth values up to this size are real in a trace."""
_FEW = 1 << 16
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


class Faker:
    """Turns real tensors into fake ones: the same tensor always into the same fake, views of one storage into
    views of one storage.

    Small tensors of integers and truth values (token ids, masks, positions) are copied instead: models branch
    on what is in them.
    """

    def __init__(self) -> None:
        self.mode = private.fake_mode()
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """The fake of one tensor: same geometry, device, ``requires_grad``; its ``grad`` has a fake of its
        own.
        """
        found = self._made.get(id(real))
        if found is not None:
            return found[1]
        if is_small_constant(real):
            with private.without_fake_mode():
                copy = real.detach().clone()
            self._made[id(real)] = (real, copy)
            return copy
        source = real.detach() if not real.is_leaf else real
        fake = self.mode.from_tensor(source, static_shapes=True)
        if real.requires_grad and not fake.requires_grad:
            fake.requires_grad_()
        if real.is_leaf and real.grad is not None and fake.grad is None:
            fake.grad = self.tensor(real.grad)
        self._made[id(real)] = (real, fake)
        # marks that a model sets on its parameters and asks for in forward
        for name, item in vars(real).items():
            if name not in vars(fake):
                setattr(fake, name, self.attribute(item))
        return fake

    def tree(self, items: Any) -> Any:
        """The same nest of containers with fake tensors in place of real ones."""
        return private.tree_map_only(torch.Tensor, self.tensor, items)

    def attribute(self, item: Any) -> Any:
        """What a module has as an attribute, itself where there is no tensor in it."""
        holds = any(isinstance(leaf, torch.Tensor) for leaf in private.tree_leaves(item))
        return self.tree(item) if holds else item


@contextmanager
def borrowed(modules: list[torch.nn.Module], faker: Faker) -> Iterator[None]:
    """Give every parameter, buffer and tensor attribute of ``modules`` a fake for the length of the block."""
    with same_attributes(modules):
        for module in dict.fromkeys(module for root in modules for module in root.modules()):
            tables: Any = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = faker.tensor(tensor)
            for name, item in list(module.__dict__.items()):
                if name not in ("_parameters", "_buffers", "_modules"):
                    swapped = faker.attribute(item)
                    if swapped is not item:
                        module.__dict__[name] = swapped
        yield


def is_small_constant(tensor: torch.Tensor) -> bool:
    """Whether a trace keeps the tensor real: small, without gradients, of integers or truth values."""
    if tensor.requires_grad or tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided and tensor.numel() * tensor.element_size() <= SMALL_BYTES


def stays_real(
    info: OpInfo, inputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call on real constants only (or one that makes integers from nothing) is carried out for real
    in a fake trace.

    So are small tensors of ones, and what is made of such: models make them as masks and windows, and ask
    what is in them.
    """
    if inputs:
        return all(
            not isinstance(t, FakeTensor)
            and (is_small_constant(t) or (t.numel() <= _FEW and not t.requires_grad))
            for t in inputs
        )
    if info.name == "aten.ones.default":
        return math.prod(args[0]) <= _FEW
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype in _INTEGERS
    return bool(args) and all(isinstance(item, int) for item in args)


def grouped(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What a product of matrices in groups returns for fake tensors: the fake kernel refuses what is not of
    bfloat16, which real ones take (mixtures of experts in float32).
    """
    shape: tuple[int, ...] = (first.shape[-2], second.shape[-1])
    if first.dim() == second.dim() == 3:
        shape = (first.shape[0], *shape)
    elif first.dim() == second.dim() and offs is not None:
        shape = (offs.shape[0], *shape)
    return torch.empty(shape, dtype=out_dtype or first.dtype, device=first.device)
