"""The ranks that share a model's sequences, and what they do together in a step (`Context`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.parallel.collectives import all_reduce, gather
from lowtide.parallel.context.heads import check_heads, heads_of, sequence_of
from lowtide.parallel.context.layout import Layout
from lowtide.parallel.context.operations import HeadsAttention, RingAttention, Seen
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.groups import TensorGroup

Exchange = Literal["ring", "all-to-all"]
IGNORED = -100
"""A label that is not counted."""


class Context:
    """How ranks share the sequences of a model.

    Args:
        group: the ranks.
        exchange: what they exchange in attention.
        opened: a trace shows what attention consists of.

    Attributes:
        layout: which tokens each rank holds.
        averaged: someone averages the gradients over these ranks: DDP or FSDP. Else they are summed
            (`lowtide.parallel.allreduce_sequence_parallel_gradients`).
    """

    def __init__(self, group: TensorGroup, exchange: Exchange, opened: bool = False) -> None:
        self.group, self.exchange, self.opened = group, exchange, opened
        self.layout = Layout(group.size, balanced=exchange == "ring")
        self.averaged = False

    def take(self, x: Tensor, dimension: int = 1, fill: Any = 0) -> Tensor:
        """This rank's part of a tensor with the whole sequence."""
        return self.layout.take(x, self.group.rank, dimension, fill)

    def own_length(self, length: int) -> int:
        """How many tokens of a sequence this rank holds, padding included."""
        return self.layout.padded(length) // self.group.size

    def places(self, length: int, device: torch.device) -> Tensor:
        """The places in the sequence of this rank's ``length`` tokens."""
        return self.take(torch.arange(length * self.group.size, device=device), 0)

    def join(self, x: Tensor, length: int, dimension: int = 1) -> Tensor:
        """The whole sequence, ``length`` tokens of it, from the ranks' parts. What follows is the same on
        every rank.
        """
        return _Join.apply(x, self, dimension, length)  # type: ignore[return-value]

    def total(self, part: Tensor) -> Tensor:
        """The sum of the ranks' parts of a loss, the same on every rank."""
        return _Total.apply(part, self)  # type: ignore[return-value]

    @property
    def factor(self) -> int:
        """What a gradient of this rank's part has to be multiplied by, since it is averaged over the ranks
        afterwards and not summed.
        """
        return self.group.size if self.averaged else 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> Tensor:
        """Attention of this rank's tokens to all that they see.

        Args:
            q, k, v: (batch, heads, part of the sequence, features).
            seen: what they see.
        """
        q, k, v = _alike(q, k, v)
        seen = replace(seen, opened=self.opened)
        if self.exchange == "ring":
            return RingAttention.apply(q, k, v, seen, self.group)  # type: ignore[return-value]
        check_heads(q.shape[1], k.shape[1], self.group.size)
        return HeadsAttention.apply(q, k, v, seen, self.group)  # type: ignore[return-value]

    def attend_causally(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's tokens to all before them, in one document."""
        return self.attend(q, k, v, Seen(None, q.shape[-1] ** -0.5))

    def attend_with(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, why: str
    ) -> Tensor:
        """The same by a function that attends to a whole sequence, of some heads.

        Args:
            attention: from queries, keys and values of the whole sequence to its result; all of (batch,
                heads, sequence, features).
            q, k, v: of this rank's part.
            why: what only that function does, for people.

        Raises:
            ParallelError: keys and values travel in a ring, which does not know the function.
        """
        if self.exchange == "ring":
            raise ParallelError(
                f"{why}: the ring has attention of its own, which does not do that: pass "
                "context_parallel(exchange='all-to-all'), or leave it out"
            )
        check_heads(q.shape[1], k.shape[1], self.group.size)
        return sequence_of(attention(*(heads_of(x, self.group) for x in (q, k, v))), self.group)


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three in one dtype: under autocast its own, as PyTorch's attention has them there."""
    device = q.device.type
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return all_reduce(part, context.group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.context.factor, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context, dimension: int, length: int) -> Tensor:
        ctx.context, ctx.dimension = context, dimension
        parts = gather(x, context.group, dimension).wait()
        return context.layout.join(parts, dimension, length).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.context.take(grad, ctx.dimension) * ctx.context.factor, None, None, None
