"""State dicts of shared models: saved at one number of ranks and loaded at another, or into a model that
nobody shares.

`sharded_state_dict` describes to ``torch.distributed.checkpoint`` where each rank's pieces lie in the whole
parameter, block by block and without padding. What is saved is then the whole parameter under its own name,
and any other cut of it can be read back. A model that is not shared gives its plain tensors under the same
names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.errors import expect
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_path, check_tensors
from lowtide.parallel.module import ParallelModule
from lowtide.parallel.partition import Partition
from lowtide.parallel.saved import SharedTensor, box, local_part, share_saved_state


def partitions_of(model: nn.Module) -> dict[str, Partition]:
    """Which part of each cut parameter this rank holds, by the parameter's name in the model; whole ones are
    not in it.
    """
    given = isinstance(model, nn.Module)
    expect(given, "the model of a sharded checkpoint", model, "a torch.nn.Module", ParallelError)
    return {
        f"{prefix}.{name}" if prefix else name: where
        for prefix, module in model.named_modules()
        if isinstance(module, ParallelModule)
        for name, where in module.partitions.items()
        if not where.is_whole
    }


def sharded_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The state of a model, and of its optimizer, for ``torch.distributed.checkpoint`` to save or to load
    into.

    Args:
        model: shared or not.
        optimizer: of its parameters; a fresh one gets its state made.

    Returns:
        ``{"model": {name: tensor}, "optimizer": {...}}``; the tensors share the model's memory.

    >>> sorted(sharded_state_dict(nn.Linear(2, 2))["model"])
    ['bias', 'weight']
    """
    given = isinstance(model, nn.Module)
    expect(given, "the model of a sharded checkpoint", model, "a torch.nn.Module", ParallelError)
    known = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    allowed = "a torch.optim.Optimizer, or None"
    expect(known, "the optimizer of a sharded checkpoint", optimizer, allowed, ParallelError)
    state: dict[str, Any] = {"model": dict(model.state_dict())}
    if optimizer is not None:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        share_saved_state(optimizer)
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def save_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Save to a folder, every rank its pieces. A collective: every process calls it.

    Raises:
        ParallelError: the folder cannot be written to.
    """
    import torch.distributed.checkpoint as dcp

    check_path("save_checkpoint", path)
    state, alone = sharded_state_dict(model, optimizer), not dist.is_initialized()
    with _said("save_checkpoint", path, "give a folder that can be written to"):
        dcp.save(state, checkpoint_id=path, no_dist=alone)  # pyright: ignore[reportPrivateImportUsage]


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load what `save_checkpoint` saved, at any number of ranks. A collective: every process calls it.

    Raises:
        ParallelError: there is no such checkpoint, or it is of other names or shapes.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    check_path("load_checkpoint", path)
    state = sharded_state_dict(model, optimizer)
    remedy = "give a folder that save_checkpoint wrote, and the model and optimizer that it was given"
    with _said("load_checkpoint", path, remedy), torch.no_grad():
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())  # pyright: ignore
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


@contextmanager
def _said(function: str, path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """A context: what cannot be saved or loaded is said in one sentence, on every rank."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        what = str(first).splitlines()[0]
        raise ParallelError(f"{function}(path={str(path)!r}): {what}: {remedy}") from first


@torch.no_grad()
def load_whole_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state dict of the plain model. Each rank takes its part.

    Raises:
        ParallelError: names are missing, unknown, or have another shape.
    """
    cuts, own = partitions_of(model), model.state_dict(keep_vars=True)
    named = isinstance(state, Mapping)
    expect(named, "load_whole_state_dict(state=)", state, "a state dict, tensors by name", ParallelError)
    check_tensors("load_whole_state_dict", **{str(name): tensor for name, tensor in state.items()})
    missing, unknown = own.keys() - state.keys(), state.keys() - own.keys()
    if missing or unknown:
        raise ParallelError(
            f"the state dict does not fit: missing {sorted(missing) or 'nothing'}, unknown "
            f"{sorted(unknown) or 'nothing'}"
        )
    for name, tensor in own.items():
        where, whole = cuts.get(name), state[name]
        if tuple(whole.shape) != (tuple(tensor.shape) if where is None else where.shape):
            raise ParallelError(
                f"{name} has the shape {tuple(whole.shape)} in the state dict and {tuple(tensor.shape)} in "
                "the model"
            )
        local = local_part(tensor)
        if where is not None and where.is_padded:
            local.zero_()  # the padding
        for offsets, piece in _pieces(tensor, where):
            piece.copy_(
                whole[tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))]
            )


@torch.no_grad()
def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the model would have if nobody shared it, on every rank. A collective: every rank
    of its groups calls it.
    """
    found: dict[str, Tensor] = {}
    cuts = partitions_of(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        where = cuts.get(name)
        if where is None:
            found[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()
            continue
        part = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
        found[name] = whole_of(part, where)
    return found


def whole_of(part: Tensor, where: Partition) -> Tensor:
    """A whole parameter from each rank's part. A collective: every rank of its group calls it."""
    whole = part.new_zeros(where.shape)
    for offsets, piece in _pieces(part, where):
        whole[tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))] = piece
    if where.group.size > 1:
        dist.all_reduce(whole, group=where.group.process_group)
    return whole


def _pieces(tensor: Tensor, where: Partition | None) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Where each piece of a parameter that this process holds begins in the whole one, and the piece."""
    if where is not None:
        yield from SharedTensor(tensor.detach(), where).pieces()
        return
    local, (offsets, _) = local_part(tensor), box(tensor)
    if local.numel():
        yield offsets, local
