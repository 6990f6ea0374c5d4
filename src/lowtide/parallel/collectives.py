"""The collectives, on tensors below autograd: started now, waited for when the result is needed.

They are PyTorch's functional collectives: operations like any other, which `lowtide.trace` sees and a plan
can replay, and which run beside the computation that is issued between their start and `Pending.wait`, on
Gloo and on NCCL. A group of one moves nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide import accelerator
from lowtide.parallel.errors import ParallelError, ParallelWarning
from lowtide.parallel.groups import TensorGroup
from lowtide.private import collectives, is_fake, wait_for_collective

if dist.is_available():
    functional = collectives()


class Pending:
    """A collective under way.

    Args:
        result: what the operation returned; not to be read before `wait`.
        finish: from the finished result to what was asked for.
        running: whether there is anything to wait for.
    """

    __slots__ = ("_finish", "_result", "_running")

    def __init__(
        self, result: Tensor, finish: Callable[[Tensor], Tensor] | None = None, running: bool = True
    ) -> None:
        self._result = result
        self._finish = finish
        self._running = running
        if not torch.compiler.is_compiling() and running and accelerator.is_accelerator(result.device):
            _tell_of_queues()  # Dynamo enters nothing behind the first condition

    def wait(self) -> Tensor:
        """The result, complete."""
        result = wait_for_collective(self._result) if self._running else self._result
        return result if self._finish is None else self._finish(result)


@cache
def _tell_of_queues() -> None:
    """Warn, once, where collectives may not run beside the products that they are started for."""
    if accelerator.may_start_late():
        warnings.warn(
            "collectives of the parallel layers may wait for the products that they are to run beside: set "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment before the program starts",
            ParallelWarning,
            stacklevel=4,
        )


def gather(x: Tensor, group: TensorGroup, dimension: int = 0) -> Pending:
    """Concatenate every rank's ``x`` along ``dimension``.

    The result lies in memory with ``dimension`` outermost, as it travels, so only the small shard is ever
    copied.
    """
    if group.size == 1:
        return Pending(x, running=False)
    shard = x.movedim(dimension, 0).contiguous()
    whole = functional.all_gather_into_tensor(shard, group.size, group.name)
    return Pending(whole, lambda y: y.movedim(0, dimension))


def gather_features(x: Tensor, group: TensorGroup, dimension: int = -1) -> Pending:
    """Concatenate every rank's ``x`` along ``dimension``, contiguously."""
    if group.size == 1:
        return Pending(x, running=False)
    whole = functional.all_gather_into_tensor(x.contiguous().unsqueeze(0), group.size, group.name)
    at = dimension % x.ndim
    return Pending(whole, lambda y: y.movedim(0, at).flatten(at, at + 1))


def reduce_scatter(
    x: Tensor, group: TensorGroup, dimension: int = 0, dtype: torch.dtype | None = None
) -> Pending:
    """Sum every rank's ``x`` and keep this rank's piece along ``dimension``; sums are made in ``dtype`` where
    it is wider.
    """
    if group.size == 1:
        return Pending(x, running=False)
    check_divides(x, dimension, group, "the sequence")
    own = x.dtype
    rows = x.movedim(dimension, 0).to(wider(own, dtype)).contiguous()
    piece = functional.reduce_scatter_tensor(rows, "sum", group.size, group.name)
    return Pending(piece, lambda y: y.to(own).movedim(0, dimension))


def all_reduce(
    x: Tensor,
    group: TensorGroup,
    dtype: torch.dtype | None = None,
    *,
    op: str = "sum",
    in_place: bool = False,
) -> Pending:
    """Reduce ``x`` over the ranks; ``in_place`` may overwrite it, for a caller who owns it.

    In a graph that is compiled nothing is overwritten: the compiler finds out by itself what may be.
    """
    if group.size == 1:
        return Pending(x, running=False)
    own = x.dtype
    wide = x.to(wider(own, dtype)).contiguous()
    if (in_place or wide is not x) and not torch.compiler.is_compiling():
        result = functional.all_reduce_(wide, op, group.name)
    else:
        result = functional.all_reduce(wide, op, group.name)
    return Pending(result, lambda y: y.to(own))


def all_to_all(x: Tensor, group: TensorGroup) -> Pending:
    """Give the ranks the slices of ``x`` along its first dimension, one each; the result has theirs, by
    rank.
    """
    if group.size == 1:
        return Pending(x, running=False)
    each = [x.shape[0] // group.size] * group.size
    return Pending(functional.all_to_all_single(x.contiguous(), each, each, group.name))


def exchange(sent: Tensor, target: int, length: int, source: int, group: TensorGroup) -> Pending:
    """Send a flat tensor to one rank, and get one of ``length`` elements from another. Every rank of the
    group takes part, also one that sends or gets nothing. What is sent has no bytes any more once the other
    is there: a thread of Gloo may hold the tensor for a while longer.
    """
    inputs, outputs = [0] * group.size, [0] * group.size
    inputs[target], outputs[source] = sent.numel(), length
    result = functional.all_to_all_single(sent, outputs, inputs, group.name)

    def emptied(y: Tensor) -> Tensor:
        sent.untyped_storage().resize_(0)
        return y

    return Pending(result, None if is_fake(sent) else emptied)


def piece_of(x: Tensor, group: TensorGroup, dimension: int, what: str = "the dimension") -> Tensor:
    """This rank's piece of a tensor that every rank has, as a tensor of its own."""
    if group.size == 1:
        return x
    check_divides(x, dimension, group, what)
    length = x.shape[dimension] // group.size
    return x.narrow(dimension, group.rank * length, length).clone(memory_format=torch.contiguous_format)


def wider(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a sum is made: never narrower than the tensor's own."""
    return own if dtype is None else torch.promote_types(own, dtype)


def check_divides(x: Tensor, dimension: int, group: TensorGroup, what: str) -> None:
    """Raise a `ParallelError` unless the ranks get equal pieces."""
    length = x.shape[dimension]
    if length % group.size:
        short = -length % group.size
        raise ParallelError(
            f"{what} has length {length} (dimension {dimension} of shape {tuple(x.shape)}), which does not "
            f"divide among {group.size} ranks: pad it by {short} to {length + short}, or use a number of "
            "ranks that divides it"
        )
