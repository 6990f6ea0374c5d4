"""The norm of gradients that ranks hold parts of, and clipping by it.

A parameter that tensor-parallel layers cut, or that FSDP2 shards, counts with the parts of all ranks; a
parameter that every rank holds whole counts once. So every rank gets the norm that one process with the whole
model would, and scales by the same factor: what ranks hold alike stays alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import expect
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_numbers, parameters_of
from lowtide.parallel.groups import ALONE, TensorGroup, tensor_group
from lowtide.parallel.shared import over_ranks, refuse_partial, share_of
from lowtide.private import is_distributed, without_torch_function


@torch.no_grad()
def get_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pipeline: Any = None,
    counted_elsewhere: Collection[Tensor] = (),
) -> Tensor:
    """The gradient norm of a model that is split among ranks: that of one process with the whole model.

    A collective: every rank of the model calls it, with its parameters in the same order.

    Args:
        parameters: of the model, once its sequence-parallel gradients have been summed. Those without a
            gradient count nothing.
        norm_type: order of the norm; ``float("inf")`` is the largest absolute value.
        error_if_nonfinite: raise where the norm is infinite or not a number.
        foreach: passed on to ``torch.nn.utils.get_total_norm``.
        pipeline: ranks that hold other layers of the same model (as `tensor_group` takes
            them); ``None`` is none.
        counted_elsewhere: parameters that another rank of ``pipeline`` holds, too, and counts.

    Returns:
        A scalar on the gradients' device, the same on every rank; in float32 at least where ranks share
        anything.

    Raises:
        ParallelError: a gradient is only this rank's part of a sum, ``norm_type`` is not above 0, or an
            argument is something else.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.

    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[-3.0]])
    >>> get_grad_norm(layer.parameters())
    tensor(3.)

    Source: neuronx-distributed, ``parallel_layers.grads.get_grad_norm``.
    """
    own = parameters_of("get_grad_norm", parameters)
    check_numbers("get_grad_norm", 0, norm_type=norm_type)
    order, allowed = float(norm_type), "the order of a norm, above 0, or float('inf')"
    expect(order > 0, "get_grad_norm(norm_type=)", norm_type, allowed, ParallelError)
    elsewhere = {id(one) for one in parameters_of("get_grad_norm", counted_elsewhere, "counted_elsewhere")}
    counted = [parameter for parameter in own if id(parameter) not in elsewhere]
    stages = ALONE if pipeline is None else tensor_group(pipeline, "pp")
    if stages.size == 1 and not is_shared(own):
        for parameter in own:
            refuse_partial(parameter)
        with without_torch_function():
            total = nn.utils.get_total_norm(
                [p.grad for p in counted if p.grad is not None], order, foreach=foreach
            )
    else:
        pieces = [(p, _piece(p, p.grad)) for p in counted]
        total = total_norm(pieces, order, lambda some: _norm_of(some, order, foreach), stages)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {order} of the gradients is {total.item()}, so they cannot be clipped: zero "
            "the gradients and skip this step, or pass error_if_nonfinite=False"
        )
    return total


@torch.no_grad()
def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pipeline: Any = None,
    counted_elsewhere: Collection[Tensor] = (),
) -> Tensor:
    """Scale the gradients of a shared model so that its norm is at most ``max_norm``; returns the norm
    before.

    What ``torch.nn.utils.clip_grad_norm_`` is to a model of one process. A collective, as `get_grad_norm`,
    whose arguments these are.

    Example:
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[4.0]])
        >>> clip_grad_norm(layer.parameters(), max_norm=1.0)
        tensor(4.)
        >>> round(layer.weight.grad.item(), 4)
        1.0

    Source: neuronx-distributed, ``parallel_layers.grads.clip_grad_norm``.
    """
    own = parameters_of("clip_grad_norm", parameters)
    check_numbers("clip_grad_norm", 0, max_norm=max_norm)
    total = get_grad_norm(
        own,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
        foreach=foreach,
        pipeline=pipeline,
        counted_elsewhere=counted_elsewhere,
    )
    if math.isfinite(max_norm):
        nn.utils.clip_grads_with_norm_(own, max_norm, total, foreach)
    return total


def is_shared(parameters: Iterable[Tensor]) -> bool:
    """Whether other ranks hold parts of any of the parameters."""
    return any(share_of(parameter) is not None or is_distributed(parameter) for parameter in parameters)


def total_norm(
    pieces: Sequence[tuple[Tensor, Tensor | None]],
    order: float,
    norm_of: Callable[[list[Tensor]], Tensor],
    pipeline: TensorGroup = ALONE,
) -> Tensor:
    """The norm over ranks, from what this one holds.

    Args:
        pieces: (parameter, what this rank holds of its gradient, or ``None``), in the same order on every
            rank.
        order: of the norm.
        norm_of: from a list of such pieces, which may be empty, to their norm.
        pipeline: ranks that hold other parameters.

    Raises:
        ParallelError: a gradient is only this rank's part of a sum.
    """
    # by the groups over which a parameter is cut
    kinds: dict[tuple[str, ...], tuple[list[Any], list[Any]]] = {}
    for parameter, piece in pieces:
        refuse_partial(parameter)
        groups = _groups_of(parameter)
        _, held = kinds.setdefault(tuple(group.group_name for group in groups), (groups, []))
        if piece is not None:
            held.append(piece)
    device = _device_of([parameter for parameter, _ in pieces])
    totals = [over_ranks(norm_of(held).to(device), order, groups) for groups, held in kinds.values()]
    total = torch.linalg.vector_norm(
        torch.stack(totals or [torch.zeros((), dtype=torch.float64, device=device)]), order
    )
    if pipeline.size > 1:
        total = over_ranks(total, order, [pipeline.process_group])
    wide = [piece.dtype for _, piece in pieces if piece is not None]
    return total if torch.float64 in wide else total.float()


def _groups_of(parameter: Tensor) -> list[Any]:
    """The process groups over which a parameter is cut: by FSDP2 as a DTensor, and by the layer that it
    belongs to.
    """
    groups: list[Any] = []
    sharded: Any = parameter
    if is_distributed(sharded):
        gradient: Any = sharded.grad if hasattr(sharded.grad, "placements") else sharded
        for dimension, placement in enumerate(gradient.placements):
            if placement.is_replicate():
                continue
            if placement.is_partial():
                raise ParallelError(
                    f"a gradient of shape {tuple(parameter.shape)} has the placement {placement}, a part of "
                    "a sum: redistribute it first"
                )
            groups.append(gradient.device_mesh.get_group(dimension))
    share = share_of(parameter)
    if share is not None:
        groups += share.groups
    return groups


def _piece(parameter: Tensor, gradient: Any) -> Tensor | None:
    """What this rank holds of a gradient."""
    if gradient is None:
        return None
    with without_torch_function():
        held = gradient.to_local() if hasattr(gradient, "to_local") else gradient.detach()
        return held.coalesce().values() if held.is_sparse else held


def _norm_of(pieces: Sequence[Tensor], order: float, foreach: bool | None) -> Tensor:
    """The norm of tensors of this rank; those of 16 bits are summed in float32."""
    narrow = [
        torch.linalg.vector_norm(piece, order, dtype=torch.float32)
        for piece in pieces
        if piece.dtype.itemsize < 4
    ]
    return nn.utils.get_total_norm(
        [*narrow, *(piece for piece in pieces if piece.dtype.itemsize >= 4)], order, foreach=foreach
    )


def _device_of(parameters: Sequence[Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")
