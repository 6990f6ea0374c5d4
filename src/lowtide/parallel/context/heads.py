"""Heads for the sequence: all-to-all exchanges of DeepSpeed-Ulysses (arXiv 2309.14509).

Between the layers a rank has all heads of its part of the sequence, in attention all of the sequence of its
part of the heads. Where there are fewer heads of keys and values than ranks, several ranks get the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.parallel.collectives import Pending, all_to_all
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.groups import TensorGroup


def sends_less(heads: int, key_heads: int, ranks: int) -> bool:
    """Whether heads divide among ranks, and exchanging them sends no more in a step than a ring does.

    Of h heads of queries and g of keys and values, forward and backward exchange 5 h + 4 g heads of
    (c - 1) / c of a rank's tokens. In a ring three quarters of the keys and values travel to each of c - 1
    ranks, again in backward, and their gradients back.

    >>> sends_less(8, 8, 2), sends_less(8, 2, 2), sends_less(32, 8, 8)
    (True, False, True)
    """
    in_ring = 3 * (3 / 4) * 2 * key_heads
    return heads % ranks == key_heads % ranks == 0 and 5 * heads + 4 * key_heads <= in_ring * ranks


def check_heads(heads: int, key_heads: int, ranks: int) -> None:
    """Raise unless the heads divide among the ranks.

    Raises:
        ParallelError: they do not.
    """
    if heads % ranks or (key_heads % ranks and ranks % key_heads):
        raise ParallelError(
            f"{heads} attention heads and {key_heads} key-value heads do not divide among {ranks} ranks, "
            "which the all-to-all exchange needs: pass exchange='ring', or use a number of ranks that "
            "divides the heads"
        )


def to_heads(tensors: Sequence[Tensor], group: TensorGroup) -> tuple[Tensor, ...]:
    """From all heads of this rank's part of the sequence to its heads of the whole sequence.

    Args:
        tensors: (batch, heads, part of the sequence, features) each; all travel at once.
        group: the ranks.
    """

    def start(x: Tensor) -> Pending:
        if x.shape[1] % group.size:
            x = x.repeat_interleave(group.size // x.shape[1], 1)
        return all_to_all(x.unflatten(1, (group.size, -1)).movedim(1, 0), group)

    started = [start(x) for x in tensors]
    # (ranks, batch, heads, part, features)
    return tuple(one.wait().movedim(0, 2).flatten(2, 3) for one in started)


def from_heads(tensors: list[Tensor], group: TensorGroup) -> tuple[Tensor, ...]:
    """From this rank's heads of the whole sequence to all heads of its part of the sequence. In memory the
    features of a token's heads lie side by side.

    Args:
        tensors: all travel at once; each is taken off the list as it leaves.
        group: the ranks.
    """
    started: list[Pending] = []
    while tensors:
        started.append(all_to_all(tensors.pop(0).unflatten(2, (group.size, -1)).movedim(2, 0), group))
    return tuple(_by_token(started.pop(0)) for _ in range(len(started)))


def _by_token(pending: Pending) -> Tensor:
    return pending.wait().permute(1, 3, 0, 2, 4).flatten(2, 3).contiguous().transpose(1, 2)


def shared_sum(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of ``heads`` heads, from that of a copy of each for the ranks that use it."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


class _Heads(torch.autograd.Function):
    """`to_heads` of one tensor, and back in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.heads = group, x.shape[1]
        return to_heads((x,), group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return shared_sum(from_heads([grad], ctx.group)[0], ctx.heads), None


class _Sequence(torch.autograd.Function):
    """`from_heads` of one tensor, and back in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return from_heads([x], group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return to_heads((grad,), ctx.group)[0], None


def heads_of(x: Tensor, group: TensorGroup) -> Tensor:
    """As `to_heads`, for a function of autograd's to follow."""
    return _Heads.apply(x, group)  # type: ignore[return-value]


def sequence_of(x: Tensor, group: TensorGroup) -> Tensor:
    """As `from_heads`, behind a function of autograd's."""
    return _Sequence.apply(x, group)  # type: ignore[return-value]
