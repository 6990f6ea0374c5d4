"""What a checkpoint holds of the model: pieces of whole parameters and of their optimizer state, with where
they lie, so that a run can go on at another number of ranks.

Where FSDP shards parameters over the data-parallel ranks, a piece is some rows of what a tensor-parallel rank
holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.meter.resident import own_share
from lowtide.parallel.checkpoint import partitions_of
from lowtide.parallel.partition import Partition
from lowtide.parallel.saved import own_part
from lowtide.train.checkpoint import CheckpointError
from lowtide.train.ranks import Ranks

_WEIGHT = "weight"


def pieces(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, ranks: Ranks
) -> list[dict[str, Any]]:
    """What this rank writes of each parameter and buffer: what no rank before it holds."""
    packed = optimizer.state_dict()["state"]
    states = {
        parameter: {key: own_part(entry) for key, entry in packed.get(number, {}).items()}
        for number, parameter in enumerate(_parameters(optimizer))
    }
    return list(_pieces(modules, states, ranks))


@torch.no_grad()
def load(
    contents: Iterable[list[dict[str, Any]]], modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> None:
    """Fill this rank's parts of the parameters and of their optimizer state from what any ranks wrote.

    Raises:
        CheckpointError: they hold another model.
    """
    wanted = dict(_targets(modules))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    for content in contents:
        for piece in content:
            if piece["name"] in found:
                found[piece["name"]].append(piece)
    states: dict[Tensor, dict[str, Tensor]] = {}
    for name, (tensor, where) in wanted.items():
        if not found[name]:
            raise CheckpointError(f"the checkpoint does not hold {name}: it is of another model")
        state = _fill(name, tensor, where, _whole(found.pop(name)))
        if state:
            states[tensor] = state
    packed = {number: states[p] for number, p in enumerate(_parameters(optimizer)) if p in states}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": packed})


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """In the order in which a state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _whole(pieces: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A whole parameter and its optimizer state from the pieces that ranks wrote."""
    entries: dict[str, Tensor] = {}
    for piece in _join(pieces):
        dimension = piece["dimension"]
        for key, tensor in piece["tensors"].items():
            if dimension is None or tensor.ndim == 0:
                entries[key] = tensor
                continue
            target = entries.setdefault(key, tensor.new_zeros(piece["shape"]))
            each = tensor.shape[dimension] // len(piece["slices"])  # with padding, where it was written
            for k, (start, stop) in enumerate(piece["slices"]):
                target.narrow(dimension, start, stop - start).copy_(
                    tensor.narrow(dimension, k * each, stop - start)
                )
    return entries


def _join(pieces: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The pieces, those that are rows of one put together."""
    parts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for piece in pieces:
        if "rows" not in piece:
            yield piece
            continue
        start, stop, length = piece["rows"]
        whole = parts.setdefault(tuple(map(tuple, piece["slices"])), {**piece, "tensors": {}})["tensors"]
        for key, tensor in piece["tensors"].items():
            if tensor.ndim == 0:
                whole[key] = tensor
            else:
                whole.setdefault(key, tensor.new_zeros((length, *tensor.shape[1:])))[start:stop] = tensor
    yield from parts.values()


def _pieces(
    modules: Sequence[nn.Module], states: Mapping[Tensor, dict[str, Any]], ranks: Ranks
) -> Iterator[dict[str, Any]]:
    for name, (tensor, where) in _targets(modules):
        cut = where is not None and where.dimension is not None
        sharded = _is_sharded(tensor)
        first = _is_first_copy(tensor) if sharded else not ranks.shards.rank
        if (not cut and ranks.tensor.rank) or not first:
            continue
        tensors = {_WEIGHT: tensor.detach()}
        tensors |= {key: item for key, item in states.get(tensor, {}).items() if isinstance(item, Tensor)}
        if sharded:
            yield {
                "name": name,
                "shape": where.shape if cut and where is not None else tuple(tensor.shape),
                "dimension": where.dimension if cut and where is not None else None,
                "slices": where.slices() if cut and where is not None else [],
                "rows": (*_rows(tensor), tensor.shape[0]),
                "tensors": {key: own_share(item) for key, item in tensors.items()},
            }
            continue
        if not cut or where is None or where.dimension is None:
            yield {
                "name": name,
                "shape": tuple(tensor.shape),
                "dimension": None,
                "slices": [],
                "tensors": tensors,
            }
            continue
        dimension = where.dimension
        yield {
            "name": name,
            "shape": where.shape,
            "dimension": dimension,
            "slices": where.slices(),
            "tensors": {
                key: item if item.ndim == 0 else where.without_padding(item) for key, item in tensors.items()
            },
        }


def _targets(modules: Sequence[nn.Module]) -> Iterator[tuple[str, tuple[Any, Partition | None]]]:
    """Parameters and saved buffers by their name in the whole model, with where they lie in the whole."""
    for module in modules:
        cuts = partitions_of(module)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, tensor in module.state_dict(keep_vars=True).items():
            yield name, (parameters.get(name, tensor), cuts.get(name))


def _fill(
    name: str,
    tensor: Tensor,
    where: Partition | None,
    entries: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Put a parameter's part in place; returns that of its optimizer state."""
    expected = tuple(tensor.shape) if where is None else where.shape
    if tuple(entries[_WEIGHT].shape) != tuple(expected):
        raise CheckpointError(
            f"{name} has the shape {tuple(entries[_WEIGHT].shape)} in the checkpoint and {tuple(expected)} "
            "in the model"
        )

    def part(item: Tensor) -> Tensor:
        own = item if where is None or item.ndim == 0 else where.take(item)
        if item.ndim and _is_sharded(tensor):
            return _sharded_like(tensor, own[slice(*_rows(tensor))].to(tensor.device, copy=True))
        return own.to(tensor.device, copy=True)

    tensor.copy_(part(entries.pop(_WEIGHT)))
    return {key: part(item) for key, item in entries.items()}


def _is_sharded(tensor: Any) -> bool:
    """Whether FSDP left this process some rows of the tensor only."""
    return hasattr(tensor, "to_local")


def _is_first_copy(tensor: Any) -> bool:
    """Whether no process before this one holds the same rows (HSDP has copies)."""
    placed = enumerate(tensor.placements)
    return all(not (kind.is_replicate() and tensor.device_mesh.get_local_rank(k)) for k, kind in placed)


def _rows(tensor: Any) -> tuple[int, int]:
    """The rows of a sharded tensor that this process holds: those of ``torch.chunk``, as FSDP deals them."""
    mesh, length = tensor.device_mesh, tensor.shape[0]
    last = mesh.ndim - 1  # copies come first
    each = -(-length // mesh.size(last))
    start = min(length, mesh.get_local_rank(last) * each)
    stop = min(length, start + each)
    assert tensor.to_local().shape[0] == stop - start, (
        f"{tuple(tensor.shape)} is not sharded by rows: {tensor.placements}"
    )
    return start, stop


def _sharded_like(tensor: Any, local: Tensor) -> Tensor:
    """The sharded tensor of which this process holds ``local``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
