"""Parameters that ranks share: how a parameter knows that this rank holds a part of it, and gradients whose
norm is the whole one's.

A cut parameter is a plain tensor, so whoever takes its norm would take this rank's part for the whole.
`mark_shared` gives it neuronx-distributed's attributes (``tensor_model_parallel``, ``partition_dim``,
``partition_stride``), by which `lowtide.parallel.clip_grad_norm` counts it, and a class whose ``grad`` is a
`SharedGradient`: the functions that ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` call then give
the norm over all ranks. Who wrote the gradient (backward, DDP, the program) makes no difference.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.errors import expect
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.partition import Partition
from lowtide.private import no_torch_function, without_torch_function

_NORMS = ("linalg_vector_norm", "_foreach_norm")
"""What ``torch.nn.utils.get_total_norm`` calls: on one gradient, and on a list of them."""


class Share:
    """What is known of a parameter of which this rank holds a part.

    Attributes:
        where: which part.
    """

    __slots__ = ("where",)

    def __init__(self, where: Partition) -> None:
        self.where = where

    @property
    def groups(self) -> list[Any]:
        """The process groups whose ranks hold the other parts: one, or none."""
        return [self.where.group.process_group] if self.where.group.size > 1 else []

    def __reduce__(self) -> Any:
        return _no_share, ()


def _no_share() -> None:
    """What a pickled share becomes; the module that owns the parameter marks it again."""


def mark_shared(parameter: Tensor, where: Partition) -> None:
    """Say that ``parameter`` is this rank's part of a whole one. Marking it again does nothing. In a group of
    one only what is padded is marked.

    >>> from lowtide.parallel.groups import tensor_group
    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> mark_shared(weight, Partition((2, 2), 0, tensor_group(), padded=2))
    >>> share_of(weight) is None
    True
    """
    if where.is_whole:
        return
    if share_of(parameter) is None:
        marked: Any = parameter
        marked._lowtide_share = Share(where)
        marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = (
            True,
            where.dimension,
            where.stride,
        )
        watch_gradients(parameter)


def share_of(tensor: Tensor) -> Share | None:
    """What is known of a parameter of which this rank holds a part, or of its gradient; ``None`` of one that
    it holds whole.
    """
    return getattr(tensor, "_lowtide_share", None)


def refuse_partial(tensor: Tensor) -> None:
    """Refuse to take the norm of a gradient that has not been summed over the ranks yet.

    Args:
        tensor: the parameter, or its gradient.

    Raises:
        ParallelError: it is a part of a sum.
    """
    mark = getattr(tensor, "_lowtide_partial", None)
    if mark is not None and (mark.partial or mark.mixed):
        raise ParallelError(
            f"the gradient of a parameter of shape {tuple(tensor.shape)} is only this rank's part of a "
            f"sum over {mark.ranks} ranks, so its norm means nothing yet: call "
            "lowtide.parallel.allreduce_sequence_parallel_gradients(optimizer) first, then "
            "lowtide.parallel.clip_grad_norm(parameters, max_norm)"
        )


# ---- gradients that know their norm --------------------------------------------------------------


def watch_gradients(parameter: Tensor) -> None:
    """Make the parameter one whose ``grad`` is a `SharedGradient`.

    A tensor that stands for another one while a program is traced (a fake one) has no gradient, and is let
    be.
    """
    if not isinstance(parameter, _Watched) and _holds_bytes(type(parameter)):
        parameter.__class__ = _with(_Watched, type(parameter))


_GRAD: Any = Tensor.grad
"""PyTorch's own attribute of a tensor."""


class _Mixed:
    """What is added to a tensor's class. Copies and pickles of the tensor have its own class."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _own_class(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _own_class(self):
            return self.__reduce_ex__(protocol)


class _Watched(_Mixed):
    """Added to a parameter's class: the parameter's gradient is a `SharedGradient`."""

    __slots__ = ()

    @property
    def grad(self) -> Any:
        own: Any = self
        gradient: Any = _GRAD.__get__(own)
        if gradient is None or not _holds_bytes(type(gradient)):
            return gradient
        if isinstance(gradient, torch.nn.Parameter):  # of the program, which goes on using it as such
            gradient = gradient.view_as(gradient)
            _GRAD.__set__(own, gradient)
        if not isinstance(gradient, SharedGradient):
            gradient.__class__ = _with(SharedGradient, type(gradient))
        shared: Any = gradient
        shared._lowtide_share = share_of(own)
        shared._lowtide_partial = getattr(own, "_lowtide_partial", None)
        return shared

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        own: Any = self
        _GRAD.__set__(own, gradient)
        mark = getattr(own, "_lowtide_partial", None)
        if gradient is not None and mark is not None:
            mark.assigned()

    @grad.deleter
    def grad(self) -> None:
        own: Any = self
        _GRAD.__delete__(own)

    def detach(self) -> Any:
        """As of any tensor; ``torch.nn.Parameter(parameter)`` refuses what comes back in another class."""
        detached: Any = super().detach()  # type: ignore[misc]
        if sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
            detached.__class__ = type(self)
            share = share_of(self)  # type: ignore[arg-type]
            if share is not None:
                mark_shared(detached, share.where)
        return detached

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        share = share_of(self)  # type: ignore[arg-type]
        if share is not None:
            mark_shared(copied, share.where)
        return copied


class SharedGradient(_Mixed):
    """Added to the class of a gradient of a parameter that ranks share. The gradient is a plain tensor in
    everything but its norm, which is the whole gradient's.

    The norm is a collective: every rank that shares the parameter has to ask for it.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


@cache
def _with(added: type, kind: type[Tensor]) -> Any:
    """The class ``kind`` with what ``added`` adds."""
    names: dict[str, Any] = {"__slots__": (), "__module__": __name__}
    if kind is Tensor and added is _Watched:
        names["__torch_function__"] = no_torch_function  # as of a parameter
    return type(f"{added.__name__.strip('_')}{kind.__name__}", (added, kind), names)


@contextmanager
def _own_class(tensor: Any) -> Iterator[None]:
    """In the block the tensor has the class that it had before anything was added."""
    kind = type(tensor)
    tensor.__class__ = kind.__bases__[1]
    try:
        yield
    finally:
        tensor.__class__ = kind


def _holds_bytes(kind: type[Tensor]) -> bool:
    """Whether tensors of this class are no stand-ins: PyTorch runs their operations itself, or FSDP2 shards
    them.
    """
    sharded = sys.modules.get("torch.distributed.tensor")
    plain = getattr(kind, "__torch_dispatch__") is getattr(Tensor, "__torch_dispatch__")  # noqa: B009
    return plain or (sharded is not None and issubclass(kind, sharded.DTensor))


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
    if not isinstance(gradient, SharedGradient) or own.ndim:  # norms of rows are this rank's
        return own
    if own.requires_grad:
        raise ParallelError(
            "the norm of a shared parameter's gradient cannot be differentiated: take it within "
            "torch.no_grad(), or of gradient.detach()"
        )
    refuse_partial(gradient)
    share = share_of(gradient)
    order = float(args[0] if args else kwargs.get("ord", 2.0))
    allowed = "the order of a norm over ranks, above 0, or float('inf')"
    expect(order > 0, "torch.linalg.vector_norm(ord=)", order, allowed, ParallelError)
    placed: Any = own
    here = placed.full_tensor() if hasattr(placed, "full_tensor") else own
    if share is not None:
        here = over_ranks(here, order, share.groups).to(own.dtype)
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
