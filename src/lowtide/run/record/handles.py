"""What autograd holds in place of a saved tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.errors import ReplayError
from lowtide.interception import unseen
from lowtide.ops import has_plain_storage, is_wrapper
from lowtide.run.record.replay import bring_back
from lowtide.run.record.values import Ref
from lowtide.run.tensor_bytes import digest
from lowtide.run.transfers import TransferEngine
from lowtide.writes import WriteWatch

AroundUnpack = Callable[[Callable[[], torch.Tensor]], torch.Tensor]
"""Makes the call that brings an evicted tensor back."""


class Kept:
    """A saved tensor that is kept."""

    __slots__ = ("counter", "mover", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, mover: TransferEngine | None = None) -> None:
        self.mover = mover
        # an alias: a node that held its own output would be a cycle that is never freed, and a mask that the
        # model returns, too, would look as if its caller held it
        self.tensor = (
            tensor if tensor.is_leaf or not has_plain_storage(tensor) else private.unseen_alias(tensor)
        )
        self.counter = self.tensor  # it shares the version counter of what was saved
        self.version = private.version(self.counter)

    def unpack(self) -> torch.Tensor:
        """The tensor, unless it was overwritten."""
        if self.mover is not None:
            self.mover.begin()
            self.mover.ahead()
        shape = None if self.counter is self.tensor else self.tensor.shape
        _check_version(self.counter, self.version, shape)
        return self.tensor


class Evicted:
    """A saved tensor that is evicted, and brought back when autograd unpacks it."""

    __slots__ = ("around", "digest", "mover", "on_demand", "ref", "unpacked", "version", "watch", "witness")

    def __init__(
        self,
        ref: Ref,
        tensor: torch.Tensor,
        checked: int | None,
        around: AroundUnpack | None = None,
        mover: TransferEngine | None = None,
        watch: WriteWatch | None = None,
        on_demand: Any = None,
    ) -> None:
        self.mover = mover
        self.on_demand = on_demand
        self.watch = watch  # it warns what replays start from while any tensor is evicted
        self.ref = ref
        self.unpacked = True  # no reader before the constructor has succeeded
        self.witness = private.version_witness(tensor)
        self.version = private.version(self.witness)
        self.digest = checked
        self.around = around
        self.unpacked = False
        ref.value.readers += 1

    def __del__(self) -> None:
        if not self.unpacked:
            self.ref.value.count_off()

    def as_kept(self, storage: torch.UntypedStorage) -> Kept:
        """The same saved tensor, kept: it lies in ``storage``, as it did when it was evicted."""
        found = Kept(self.ref.over(storage))
        found.counter, found.version = self.witness, self.version
        return found

    def unpack(self) -> torch.Tensor:
        """The tensor, replayed or from the cache of an earlier replay."""
        return self._unpack() if self.around is None else self.around(self._unpack)

    def _unpack(self) -> torch.Tensor:
        if self.mover is not None:
            self.mover.begin()
        with unseen():
            if self.on_demand is not None:
                self.on_demand.relieve()
            found = self._bring_back()
        if self.mover is not None:
            self.mover.ahead()
        return found

    def _bring_back(self) -> torch.Tensor:
        _check_version(self.witness, self.version, self.ref.shape)
        value = self.ref.value
        overwritten_with = value.shown if isinstance(value.shown, torch.Tensor) else None
        base = bring_back(value, self.on_demand) if overwritten_with is None else overwritten_with
        if overwritten_with is None and self.digest is not None and digest(base, value.extent) != self.digest:
            node = value.node
            raise ReplayError(
                f"{node.func if node is not None else 'an operation'} gave other bytes in its replay than in "
                "the forward pass, so this step's gradients would be wrong. Does it not reproduce? Keep its "
                "module, or use verify='first' from the start, which finds that out. Or did NumPy or a "
                "kernel of your own write to what it reads between forward and backward? Only "
                "verify='always' notices that: write with PyTorch's operations, or to a copy"
            )
        if not self.unpacked:
            self.unpacked = True
            value.count_off()
        return self.ref.view(base)


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
    return packed if isinstance(packed, torch.Tensor) else packed.unpack()


def keep(tensor: torch.Tensor) -> Any:
    """Autograd saves ``tensor``: keep it, whatever it is."""
    if is_wrapper(tensor) and not private.is_transformed():
        return Wrapped(tensor, keep)
    kept = Kept(tensor)
    return Attributed(tensor, kept) if tensor.__dict__ and has_plain_storage(tensor) else kept


@contextmanager
def unseen_by_checkpoint() -> Iterator[None]:
    """Keep what autograd saves within the block where a `torch.utils.checkpoint.checkpoint` around it would
    drop it, and run the block again.
    """
    if private.torch_checkpoint() is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(keep, unpack):
        yield


def _check_version(tensor: torch.Tensor, expected: int, shape: Sequence[int] | None = None) -> None:
    if private.version(tensor) != expected:  # some nested tensors have no shape to ask for
        raise_overwritten(tensor, private.version(tensor), expected, tensor.shape if shape is None else shape)


def raise_overwritten(like: torch.Tensor, version: int, expected: int, shape: Sequence[int]) -> None:
    """Raise autograd's own error for a saved tensor that was overwritten."""
    kind = like.type().removeprefix("torch.")
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [torch.{kind} {list(shape)}] is at version {version}; expected version "
        f"{expected} instead. Hint: enable anomaly detection to find the operation that failed to "
        "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )
