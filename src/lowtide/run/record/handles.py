"""What autograd holds in place of a saved tensor, where Python packs it. C++ packs plain tensors: it holds
the tensor, or its value on the tape (``cpp/saved.h``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.errors import ReplayError
from lowtide.interception import unseen
from lowtide.ops import has_plain_storage, is_wrapper
from lowtide.run.record.engine import engine
from lowtide.run.record.values import raise_overwritten
from lowtide.run.tensor_bytes import digest

AroundUnpack = Callable[[Callable[[], torch.Tensor]], torch.Tensor]
"""Makes the call that brings an evicted tensor back."""


class Handle:
    """A saved tensor with something to do when autograd unpacks it.

    Args:
        packed: what C++ packed.
        checked: a digest that the bytes have to have.
        around: makes the call that brings the tensor back.
        mover: carries out the plan's moves: it begins, and goes on, with what is ahead.
    """

    __slots__ = ("around", "checked", "mover", "packed")

    def __init__(
        self, packed: Any, checked: int | None = None, around: AroundUnpack | None = None, mover: Any = None
    ) -> None:
        self.packed, self.checked, self.around, self.mover = packed, checked, around, mover

    def unpack(self) -> torch.Tensor:
        """The tensor."""
        return self._unpack() if self.around is None else self.around(self._unpack)

    def _unpack(self) -> torch.Tensor:
        if self.mover is not None:
            self.mover.begin()
        value = engine().value_of_handle(self.packed)
        tensor = unpack(self.packed)
        if self.checked is not None and not value.is_shown:
            with unseen():
                self._check(value, tensor)
        if self.mover is not None:
            self.mover.ahead()
        return tensor

    def _check(self, value: Any, tensor: torch.Tensor) -> None:
        if digest(tensor, value.extent) != self.checked:
            raise ReplayError(
                f"{value.node.name} gave other bytes in its replay than in the forward pass, so this "
                "step's gradients would be wrong. There are two causes. If the operation does not "
                "reproduce its results, keep its module, or use verify='first' from the start, which "
                "detects this. If NumPy or a kernel of your own wrote to its inputs between forward "
                "and backward, write with PyTorch's operations, or to a copy; only verify='always' "
                "detects this"
            )


class Attributed:
    """A saved tensor with attributes, such as Megatron's ``main_grad``: a custom function's backward reads
    them and sets others. With saved-tensor hooks autograd hands out a plain tensor without them.

    Args:
        tensor: the saved tensor.
        packed: brings its contents back.
    """

    __slots__ = ("attributes", "kind", "packed", "requires_grad")

    def __init__(self, tensor: torch.Tensor, packed: Any) -> None:
        self.kind, self.attributes, self.packed = type(tensor), tensor.__dict__, packed
        self.requires_grad = tensor.requires_grad

    def unpack(self) -> torch.Tensor:
        """The tensor; for a custom function with the original's type and its attributes."""
        found = unpack(self.packed)
        if not private.in_custom_backward():
            return found
        alias = found.data
        if self.kind is not torch.Tensor:
            alias.__class__ = self.kind
        alias.__dict__ = self.attributes  # pyright: ignore
        return private.carrier_of(alias) if self.requires_grad else alias


class Wrapped:
    """A saved tensor subclass that holds other tensors, each of which is packed on its own."""

    __slots__ = ("context", "kind", "packed", "rest", "shape", "strides")

    def __init__(self, tensor: Any, pack: Callable[[torch.Tensor], Any]) -> None:
        self.kind = type(tensor)
        names, self.context = tensor.__tensor_flatten__()
        self.shape, self.strides = tensor.shape, tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}
        self.packed = {name: pack(part) for name, part in parts.items() if _is_content(part)}
        # a DTensor's mesh, a nested tensor's offsets
        self.rest = {name: part for name, part in parts.items() if name not in self.packed}

    def unpack(self) -> torch.Tensor:
        """The subclass, made of its unpacked parts."""
        inner = {**{name: unpack(packed) for name, packed in self.packed.items()}, **self.rest}
        return self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.strides)


def _is_content(part: Any) -> bool:
    """Whether a part may be packed: not offsets and lengths, which are integers and decide a nested tensor's
    shape.
    """
    return isinstance(part, torch.Tensor) and (
        part.is_floating_point() or part.is_complex() or is_wrapper(part)
    )


def unpack(packed: Any) -> torch.Tensor:
    """The tensor for what `Recorder.pack` returned."""
    if isinstance(packed, torch.Tensor):
        return packed
    return packed.unpack() if hasattr(packed, "unpack") else engine().unpack(packed)


def kept(tensor: torch.Tensor) -> Any:
    """A saved tensor that is kept, whatever it is; for autograd to hold."""
    if has_plain_storage(tensor):
        return engine().kept(tensor)
    return SavedKept(tensor)


class SavedKept:
    """A saved tensor that is kept, and no plain one."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, private.version(tensor)

    def unpack(self) -> torch.Tensor:
        """The tensor, unless it was overwritten."""
        if private.version(self.tensor) != self.version:
            raise_overwritten(self.tensor, private.version(self.tensor), self.version, self.tensor.shape)
        return self.tensor


def keep(tensor: torch.Tensor) -> Any:
    """Autograd saves ``tensor``: keep it, whatever it is."""
    if is_wrapper(tensor) and not private.is_transformed():
        return Wrapped(tensor, keep)
    packed = kept(tensor)
    return Attributed(tensor, packed) if tensor.__dict__ and has_plain_storage(tensor) else packed


@contextmanager
def unseen_by_checkpoint() -> Iterator[None]:
    """Keep what autograd saves within the block where a `torch.utils.checkpoint.checkpoint` around it would
    drop it, and run the block again.
    """
    if private.torch_checkpoint() is None:
        yield
        return
    with private.saving(keep, unpack):
        yield
