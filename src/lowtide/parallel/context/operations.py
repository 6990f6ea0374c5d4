"""Attention to a shared sequence as operations: one of the ring, and one of a rank that holds the whole.

A ring is one operation of PyTorch, with all of its exchanges. So the ranks run equal programs, although each
has other chunks, and a plan that has them run it again makes one decision for all.

In: queries, keys and values of (batch, heads, sequence, features), of a rank's part of the sequence. Out: the
same of the result. What autograd keeps is of that part alone, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.parallel.context.blocks import Mask, Rows, accumulated_in, attend, attend_backward
from lowtide.parallel.context.documents import Documents, seen
from lowtide.parallel.context.heads import from_heads, shared_sum, to_heads
from lowtide.parallel.context.layout import Layout
from lowtide.parallel.context.ring import Ring
from lowtide.parallel.groups import ALONE, TensorGroup, tensor_group
from lowtide.private import process_group_named

_MASK = "Tensor? first, Tensor? bounds, float scale, float softcap, int window, str group_name"
_GIVEN = "Tensor q, Tensor k, Tensor v"
_BACKWARD = f"Tensor grad, {_GIVEN}, Tensor out, Tensor lse"


@dataclass(frozen=True)
class Seen:
    """What the tokens of a shared sequence see.

    Attributes:
        documents: those of the sequence, or ``None``.
        scale: of the scores.
        softcap: see `lowtide.parallel.context.blocks.Mask`.
        window: how many tokens a token sees at most, itself among them; 0 for all.
        opened: attention runs as the operations that it consists of, which a trace then shows.
    """

    documents: Documents | None
    scale: float
    softcap: float = 0.0
    window: int = 0
    opened: bool = False

    def functions(self, group: TensorGroup) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Attention among these ranks, and its backward."""
        if self.opened:
            return _forward, _backward
        space = torch.ops.lowtide_ring if group.name else torch.ops.lowtide
        return space.attention, space.attention_backward

    def arguments(self, group: TensorGroup) -> tuple[Any, ...]:
        """As the operations take it."""
        first, bounds = (None, None) if self.documents is None else self.documents
        return first, bounds, self.scale, self.softcap, self.window, group.name


def _ring(q: Tensor, mask: Mask, bounds: list[list[int]] | None, name: str) -> Ring:
    group = tensor_group(process_group_named(name))
    return Ring(group, Layout(group.size, balanced=True), q.shape[2] // 2, mask, bounds)


def _given(mask: Any) -> tuple[Mask, list[list[int]] | None, str]:
    first, bounds, scale, softcap, window, name = mask
    return Mask(scale, softcap, window, first), None if bounds is None else bounds.tolist(), name


def _kind(q: Tensor, mask: Mask, bounds: list[list[int]] | None) -> int:
    """How much a sequence that this process holds whole sees of itself."""
    whole = None if bounds is None else [[bounds[0][0], bounds[-1][1]]]
    return seen(0, 0, q.shape[2], whole, mask.window)


def _forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    mask, bounds, name = _given(given)
    with torch.autocast(q.device.type, enabled=False):  # sums are made in float32
        if name:
            return _ring(q, mask, bounds, name).forward(q, k, v)
        out, lse = attend(q, k, v, mask, _kind(q, mask, bounds), (0, 0))
        return _by_token(out.to(q.dtype)), lse.contiguous()


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    mask, bounds, name = _given(given)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # as kernels take it
    with torch.autocast(q.device.type, enabled=False):
        if name:
            return _ring(q, mask, bounds, name).backward(grad, q, k, v, out, lse)
        rows, kind = Rows(grad, q, out, lse), _kind(q, mask, bounds)
        found = attend_backward(rows, k, v, mask, kind, (0, 0))
        return tuple(_by_token(one.to(q.dtype)) for one in found)  # type: ignore[return-value]


def _by_token(x: Tensor) -> Tensor:
    """The same in memory as the layers before and behind make it: (batch, sequence, heads, features)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _forward_like(q: Tensor, k: Tensor, v: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
    out = _by_token(q.new_empty(*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=accumulated_in(q.dtype))


def _backward_like(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(_by_token(x.new_empty(x.shape)) for x in (q, k, v))  # type: ignore[return-value]


for space in ("lowtide_ring", "lowtide"):
    forward, backward = f"{space}::attention", f"{space}::attention_backward"
    torch.library.define(forward, f"({_GIVEN}, {_MASK}) -> (Tensor, Tensor)")
    torch.library.define(backward, f"({_BACKWARD}, {_MASK}) -> (Tensor, Tensor, Tensor)")
    torch.library.impl(forward, "default", _forward)
    torch.library.impl(backward, "default", _backward)
    torch.library.register_fake(forward, _forward_like)
    torch.library.register_fake(backward, _backward_like)


class RingAttention(torch.autograd.Function):
    """Attention by a ring. Kept are this rank's queries, keys, values, result and log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Seen, group: TensorGroup) -> Tensor:
        ctx.seen, ctx.group = seen, group
        out, lse = seen.functions(group)[0](q, k, v, *seen.arguments(group))
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        backward = ctx.seen.functions(ctx.group)[1]
        found = backward(grad, *ctx.saved_tensors, *ctx.seen.arguments(ctx.group))
        return *found, None, None


class HeadsAttention(torch.autograd.Function):
    """Attention of this rank's heads to the whole sequence, and all-to-all exchanges before and behind it.

    Kept are the queries, keys and values of its heads, and the result of its part of the sequence, which the
    layer behind keeps, too. Backward exchanges that result again, beside its gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Seen, group: TensorGroup) -> Tensor:
        ctx.seen, ctx.group, ctx.key_heads = seen, group, k.shape[1]
        q, k, v = to_heads((q, k, v), group)
        *made, lse = seen.functions(ALONE)[0](q, k, v, *seen.arguments(ALONE))
        out = from_heads(made, group)[0]
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        dq, dk, dv = from_heads(_of_heads(ctx, grad), ctx.group)
        return dq, shared_sum(dk, ctx.key_heads), shared_sum(dv, ctx.key_heads), None, None


def _of_heads(ctx: Any, grad: Tensor) -> list[Tensor]:
    """The gradients of this rank's heads."""
    q, k, v, out, lse = ctx.saved_tensors
    grad, out = to_heads((grad, out), ctx.group)
    return list(ctx.seen.functions(ALONE)[1](grad, q, k, v, out, lse, *ctx.seen.arguments(ALONE)))
