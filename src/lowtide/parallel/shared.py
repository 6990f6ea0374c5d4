"""Parameters that ranks share: how a parameter knows that this rank holds a part of it, and gradients whose
norm is the whole one's.

A cut parameter is a plain tensor, so whoever takes its norm would take this rank's part for the whole.
`mark_shared` gives it neuronx- distributed's attributes (``tensor_model_parallel``, ``partition_dim``,
``partition_stride``), by which `lowtide.parallel.clip_grad_norm` counts it, and a hook behind backward that
makes its gradient a `SharedGradient`: the functions that ``torch.nn.utils.clip_grad_norm_`` and
``get_total_norm`` call then give the norm over all ranks.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.parallel.errors import ParallelError
from lowtide.parallel.partition import Partition
from lowtide.private import without_torch_function

_NORMS = ("linalg_vector_norm", "_foreach_norm")
"""What ``torch.nn.utils.get_total_norm`` calls: on one gradient, and on a list of them."""


class Share:
    """What is known of a parameter of which this rank holds a part.

    Attributes:
        where: which part.
        watched: its gradients become a `SharedGradient`.
    """

    __slots__ = ("watched", "where")

    def __init__(self, where: Partition) -> None:
        self.where = where
        self.watched = False

    def __reduce__(self) -> Any:
        return _no_share, ()


def _no_share() -> None:
    """What a pickled share becomes; the module that owns the parameter marks it again."""


def mark_shared(parameter: Tensor, where: Partition) -> None:
    """Say that ``parameter`` is this rank's part of a whole one. Marking it again does nothing; in a group of
    one nothing is marked.

    >>> from lowtide.parallel.groups import tensor_group
    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> mark_shared(weight, Partition((2, 2), 0, tensor_group(), padded=2))
    >>> share_of(weight) is None
    True
    """
    if where.dimension is None or where.group.size == 1:
        return
    share = share_of(parameter)
    if share is None:
        share = Share(where)
        marked: Any = parameter
        marked._lowtide_share = share
        marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = (
            True,
            where.dimension,
            where.stride,
        )
    if not share.watched and parameter.requires_grad:
        share.watched = True
        parameter.register_post_accumulate_grad_hook(watch_gradient)


def share_of(parameter: Tensor) -> Share | None:
    """What is known of a parameter of which this rank holds a part; ``None`` of one that it holds whole."""
    return getattr(parameter, "_lowtide_share", None)


def refuse_partial(parameter: Tensor) -> None:
    """Refuse to take the norm of a gradient that has not been summed over the ranks yet.

    Raises:
        ParallelError: it is a part of a sum.
    """
    mark = getattr(parameter, "_lowtide_partial", None)
    if mark is not None and (mark.partial or mark.mixed):
        raise ParallelError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is only this rank's part of a "
            f"sum over {mark.group.size} ranks, so its norm means nothing yet: call "
            "lowtide.parallel.allreduce_sequence_parallel_gradients(optimizer) first, then "
            "lowtide.parallel.clip_grad_norm(parameters, max_norm)"
        )


# ---- gradients that know their norm --------------------------------------------------------------


class SharedGradient(Tensor):
    """A gradient of a parameter that ranks share. A plain tensor in everything but its norm, which is the
    whole gradient's.

    The norm is a collective: every rank that shares the parameter has to ask for it.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def __reduce_ex__(self, proto: Any) -> Any:
        with without_torch_function():
            return self.detach().__reduce_ex__(proto)


@cache
def _shared_dtensor() -> type[Tensor]:
    """`SharedGradient` for gradients that FSDP2 shards as well; made when there is one, since importing
    DTensor takes long.
    """
    from torch.distributed.tensor import DTensor

    class SharedDTensorGradient(DTensor):
        __slots__ = ()
        __torch_function__ = SharedGradient.__torch_function__  # type: ignore[assignment]
        __reduce_ex__ = SharedGradient.__reduce_ex__

    return SharedDTensorGradient


def watch_gradient(parameter: Tensor) -> None:
    """Make the parameter's gradient one that knows its norm. Tensors of other kinds (fake ones, stand-ins)
    are let be.
    """
    gradient = parameter.grad
    tensors = sys.modules.get("torch.distributed.tensor")
    kind: Any = type(gradient)
    if kind is not Tensor and (tensors is None or kind is not tensors.DTensor):
        return
    shared: Any = gradient
    shared.__class__ = SharedGradient if kind is Tensor else _shared_dtensor()
    shared._lowtide_parameter = weakref.ref(parameter)


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function on tensors of which some are shared gradients."""
    with without_torch_function():
        if getattr(func, "__name__", "") not in _NORMS:
            return func(*args, **kwargs)
        if isinstance(args[0], Tensor):
            return _norm(func, args[0], args[1:], kwargs)
        return [_norm(torch.linalg.vector_norm, gradient, args[1:], kwargs) for gradient in args[0]]


def _norm(func: Any, gradient: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The norm of one gradient, over every rank that holds a part of it."""
    own = func(gradient, *args, **kwargs)
    reference = getattr(gradient, "_lowtide_parameter", None)
    parameter = None if reference is None else reference()
    if parameter is None or own.ndim:  # norms of rows are this rank's
        return own
    if own.requires_grad:
        raise ParallelError(
            "the norm of a shared parameter's gradient cannot be differentiated: take it within "
            "torch.no_grad(), or of gradient.detach()"
        )
    refuse_partial(parameter)
    share = share_of(parameter)
    order = float(args[0] if args else kwargs.get("ord", 2.0))
    placed: Any = own
    here = placed.full_tensor() if hasattr(placed, "full_tensor") else own
    if share is not None:
        here = over_ranks(here, order, [share.where.group.process_group]).to(own.dtype)
    if here is own or not hasattr(placed, "full_tensor"):
        return here
    from torch.distributed.tensor import DTensor, Replicate

    mesh = placed.device_mesh
    return DTensor.from_local(here, mesh, [Replicate()] * mesh.ndim, run_check=False)


def over_ranks(norm: Tensor, order: float, groups: Sequence[Any]) -> Tensor:
    """The norm of what the ranks of ``groups`` hold together, in float64, from the norm of what this rank
    holds.
    """
    largest = math.isinf(order)
    power = norm.double() if largest else norm.double().pow(order)
    for group in groups:
        dist.all_reduce(power, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return power if largest else power.pow(1.0 / order)
