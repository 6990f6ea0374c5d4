"""State dicts that lose nothing: what a module or an optimizer says of parameters that ranks share.

``model.state_dict()`` and ``optimizer.state_dict()`` give a `SharedTensor` for each cut parameter: the whole
tensor's shape, and this rank's bytes. ``torch.distributed.checkpoint`` saves and loads every rank's pieces;
``load_state_dict`` takes them back. Whatever would take this rank's part for the whole is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide import private
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.partition import Partition
from lowtide.parallel.shared import share_of

# imported where it is used: it takes seconds, and processes that import it may abort when they end
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_REMEDY = (
    "save with lowtide.parallel.save_checkpoint, or torch.distributed.checkpoint; for one file of whole "
    "parameters take lowtide.parallel.whole_state_dict(model); for this rank's part use .local"
)

_COPIES = {
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten._to_copy.default,
}


class SharedTensor(Tensor):
    """A whole tensor of which this rank holds some slices: what ``torch.distributed.checkpoint`` needs to
    know of it.

    It has the whole tensor's shape and this rank's bytes. It can be copied, and compared with another of this
    rank's; it has no arithmetic. Writing to the pieces writes to the parameter.

    Attributes:
        tensor: the tensor-parallel rank's part, padding included; a DTensor where FSDP2 shards that once
            more.
        local: what this process holds of it.
        where: which part of the whole ``tensor`` is.
    """

    tensor: Tensor
    local: Tensor
    where: Partition

    @staticmethod
    def __new__(cls, tensor: Tensor, where: Partition) -> SharedTensor:
        self = private.wrapper_of(cls, where.shape, tensor.dtype, tensor.device)
        self.tensor, self.local, self.where = tensor, local_part(tensor), where
        return self

    def __init__(self, tensor: Tensor, where: Partition) -> None:
        """Everything is done in ``__new__``, as for every tensor."""

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SharedTensor({tuple(self.shape)}, rank {self.where.group.rank} of {self.where.group.size})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of = args[0]
        if isinstance(of, SharedTensor) and func in _COPIES:
            return SharedTensor(func(of.tensor, *args[1:], **kwargs or {}), of.where)
        if func is torch.ops.aten.equal.default and all(isinstance(one, SharedTensor) for one in args):
            return func(args[0].tensor, args[1].tensor)
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(of.shape):
            # what torch.distributed.checkpoint copies into
            return SharedTensor(func(of.tensor, of.tensor.shape, **kwargs or {}), of.where)
        raise ParallelError(f"{func} on a SharedTensor, a part of a parameter: {_REMEDY}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelError(
            f"a file of this process would hold {self!r} alone, a part of a parameter: {_REMEDY}"
        )

    def untyped_storage(self) -> Any:
        """Refused: who writes files of whole tensors (``save_pretrained``) asks for it.

        Raises:
            ParallelError: always.
        """
        raise ParallelError(
            f"{self!r} has no bytes of the whole tensor, it is a part of a parameter: {_REMEDY}"
        )

    def pieces(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """Where each piece that this process holds begins in the whole, and the piece. No collective."""
        offsets, sizes = box(self.tensor)
        cut = self.where.dimension or 0
        held, until = offsets[cut], offsets[cut] + sizes[cut]  # of the tensor-parallel rank's part
        for start, stop, at in self.where.pieces():
            low, high = max(at, held), min(at + stop - start, until)
            if high > low and self.local.numel():
                begins = [*offsets]
                begins[cut] = start + low - at
                yield torch.Size(begins), self.local.narrow(cut, low - held, high - low)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.size(),
                ),
            )
            for offsets, piece in self.pieces()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets=offsets, sizes=piece.size()) for offsets, piece in self.pieces()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, piece in self.pieces():
            if index.offset is not None and tuple(index.offset) == tuple(offsets):
                return piece
        raise ParallelError(f"{index.fqn}: this rank holds no piece that begins at {index.offset}")


def local_part(tensor: Any) -> Tensor:
    """What this process holds of a tensor that FSDP2 may have sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where what this process holds of a tensor begins in it, and its size.

    Raises:
        ParallelError: it is several boxes.
    """
    if not hasattr(tensor, "to_local"):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise ParallelError(
            f"a parameter placed {tensor.placements} lies in {len(chunks)} boxes on this rank: shard it "
            "along one dimension"
        )
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


# ---- modules -------------------------------------------------------------------------------------


def share_saved(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook after ``state_dict``: cut parameters become `SharedTensor`s. Parameters themselves
    (``keep_vars=True``) stay.
    """
    for name, where in module.partitions.items():
        tensor = state.get(prefix + name)
        if tensor is not None and tensor is not module._parameters.get(name):
            state[prefix + name] = shared(tensor, where)


def take_own(
    module: Any, state: dict[str, Any], prefix: str, metadata: Any, strict: Any, *problems: Any
) -> None:
    """A hook before ``load_state_dict``: of `SharedTensor`s, what this rank holds."""
    for name in module.partitions:
        key = prefix + name
        if key in state:
            state[key] = own_part(state[key], module.partitions[name], key)


def shared(tensor: Any, where: Partition | None) -> Any:
    """A tensor as a `SharedTensor`, where it is this rank's part of a cut parameter, or of its state."""
    if where is None or where.is_whole:
        return tensor
    if type(tensor) is SharedTensor or not isinstance(tensor, Tensor) or tensor.shape != where.local_shape:
        return tensor
    return SharedTensor(tensor.detach(), where)


def own_part(saved: Any, where: Partition | None = None, name: str = "") -> Any:
    """What this rank holds of a saved entry.

    Raises:
        ParallelError: it is another part than ``where``.
    """
    if not isinstance(saved, SharedTensor):
        return saved
    there = saved.where
    if where is not None and (there.shape, there.dimension, there.local_shape, there.slices()) != (
        where.shape,
        where.dimension,
        where.local_shape,
        where.slices(),
    ):
        raise ParallelError(
            f"{name} is rank {there.group.rank}'s part of {there.group.size} of a {there.shape}, and this "
            f"is rank {where.group.rank} of {where.group.size} of a {where.shape}: load a checkpoint that "
            "torch.distributed.checkpoint saved, which any number of ranks reads"
        )
    return saved.tensor


# ---- optimizers ----------------------------------------------------------------------------------


def share_saved_state(optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
    """Before an optimizer's step: from now on its state dict says of cut parameters what `SharedTensor`s say.
    Doing it again does nothing.
    """
    if not getattr(optimizer, "_lowtide_saves", False):
        optimizer._lowtide_saves = True
        optimizer.register_state_dict_post_hook(_share_state)
        optimizer.register_load_state_dict_pre_hook(_take_own_state)


@cache
def watch_optimizers() -> None:
    """From now on every optimizer's state dict is right from its first step."""
    register_optimizer_step_pre_hook(share_saved_state)


def _parts(optimizer: Any, packed: dict[str, Any]) -> Iterator[tuple[Any, Partition]]:
    """The numbers that a state dict gives to parameters that ranks share, and their part."""
    # of a state dict that does not fit, the optimizer itself says so
    for group, numbers in zip(optimizer.param_groups, packed["param_groups"], strict=False):
        for parameter, number in zip(group["params"], numbers["params"], strict=False):
            share = share_of(parameter)
            if share is not None:
                yield number, share.where


def _share_state(optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
    """A hook after an optimizer's ``state_dict``: what belongs to cut parameters becomes `SharedTensor`s."""
    state = dict(packed["state"])  # the optimizer's own entries lie in it
    for number, where in _parts(optimizer, packed):
        if number in state:
            state[number] = {key: shared(entry, where) for key, entry in state[number].items()}
    return {**packed, "state": state}


def _take_own_state(optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
    """A hook before an optimizer's ``load_state_dict``."""
    state = dict(packed["state"])
    for number, where in _parts(optimizer, packed):
        if number in state:
            what = "the optimizer's state"
            state[number] = {key: own_part(entry, where, what) for key, entry in state[number].items()}
    return {**packed, "state": state}
