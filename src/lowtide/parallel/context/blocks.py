"""Attention of one chunk of queries to one chunk of keys, and its gradients.

PyTorch's flash attention computes a chunk that is seen whole, and the triangle of a chunk's own tokens. The
rest (a window, several documents, capped scores, values of another width than keys) is computed here in tiles
of bounded size, which leave out what no row of a tile sees. Both give the log-sum-exp of each row, by which
the parts of a row's softmax are merged: the online softmax of arXiv 1805.02867 and of FlashAttention (arXiv
2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.parallel.context.documents import Kind
from lowtide.private.attention import flash_attention, flash_attention_backward, has_flash_attention

TILE_ELEMENTS = 2**20
"""About how many scores a tile has."""


@dataclass(frozen=True)
class Mask:
    """What rows see, and how scores are made.

    Attributes:
        scale: of the scores.
        softcap: scores are ``softcap * tanh(score / softcap)``; 0 for as they are.
        window: how many tokens a token sees at most, itself among them; 0 for all.
        first: see `lowtide.parallel.context.documents.Documents`, or ``None``.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    first: Tensor | None = None


class Rows(NamedTuple):
    """A chunk of queries in backward.

    Attributes:
        grad: of their results.
        q: the queries.
        out, lse: their results and log-sum-exps over all that they see, merged.
    """

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are summed."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, kind: int, places: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Attention of a chunk to a chunk, and the log-sum-exp of each row: minus infinity where it sees nothing.

    Args:
        q, k, v: (batch, heads, length, features); heads of ``k`` and ``v`` divide those of ``q``.
        mask: what rows see.
        kind: how much of the chunk is seen, a `Kind`.
        places: of the first query and the first key in the sequence.
    """
    if _is_plain(q, k, v, mask, kind):
        return flash_attention(q, k, v, kind == Kind.TRIANGLE, mask.scale)
    dtype = accumulated_in(q.dtype)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)
    for rows, columns, visible in _tiles(q, k, mask, places):
        scores, _ = _scores(q, k, mask, rows, columns, visible)
        total = scores.logsumexp(-1)
        weights = (scores - total.clamp_min(torch.finfo(dtype).min)[..., None]).exp_()
        out[:, :, rows] = _by_query(weights @ v[:, :, columns].to(dtype), q)
        lse[:, :, rows] = _by_query(total[..., None], q)[..., 0]
    return out, lse


def attend_backward(
    of: Rows, k: Tensor, v: Tensor, mask: Mask, kind: int, places: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, as far as these keys go.

    Args:
        of: the queries, with their results.
        k, v, mask, kind, places: as of `attend`.
    """
    grad, q, out, lse = of
    if _is_plain(q, k, v, mask, kind):
        return flash_attention_backward(grad, q, k, v, out, lse, kind == Kind.TRIANGLE, mask.scale)
    dtype = accumulated_in(q.dtype)
    dq, dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (q, k, v))
    for rows, columns, visible in _tiles(q, k, mask, places):
        scores, capped = _scores(q, k, mask, rows, columns, visible)
        weights = (scores - _by_key(lse[:, :, rows, None], k)).exp_()
        own_grad = _by_key(grad[:, :, rows].to(dtype), k)
        delta = (own_grad * _by_key(out[:, :, rows].to(dtype), k)).sum(-1, keepdim=True)
        dv[:, :, columns] += weights.transpose(-2, -1) @ own_grad
        of_scores = weights * (own_grad @ v[:, :, columns].to(dtype).transpose(-2, -1) - delta)
        if capped is not None:
            of_scores = of_scores * (1 - (capped / mask.softcap).square())
        of_scores = of_scores * mask.scale
        dq[:, :, rows] += _by_query(of_scores @ k[:, :, columns].to(dtype), q)
        dk[:, :, columns] += of_scores.transpose(-2, -1) @ _by_key(q[:, :, rows].to(dtype), k)
    return dq, dk, dv


def _is_plain(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kind: int) -> bool:
    """Whether PyTorch's kernel computes this block."""
    return kind != Kind.SOME and not mask.softcap and has_flash_attention(q, k, v)


def _tiles(
    q: Tensor, k: Tensor, mask: Mask, places: tuple[int, int]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows and columns of the tiles in which rows see something, and which of them."""
    batch, heads, rows, _ = q.shape
    columns = k.shape[2]
    width = min(columns, 2 * mask.window or columns)
    height = max(1, min(rows, mask.window or rows, TILE_ELEMENTS // (batch * heads * width)))
    starts = range(0, rows, height)
    lows = [0] * len(starts)
    if mask.first is not None:
        lows = mask.first[:, places[0] : places[0] + rows : height].amin(0).tolist()
    for start, low in zip(starts, lows, strict=True):
        stop = min(rows, start + height)
        if mask.window:
            low = max(low, places[0] + start - mask.window + 1)
        left, right = max(0, low - places[1]), min(columns, places[0] + stop - places[1])
        if left < right:
            yield (
                slice(start, stop),
                slice(left, right),
                _visible(mask, q.device, places, start, stop, left, right),
            )


def _visible(
    mask: Mask, device: torch.device, places: tuple[int, int], start: int, stop: int, left: int, right: int
) -> Tensor:
    """Which columns each row of a tile sees: (batch or 1, 1, rows, columns)."""
    own = torch.arange(places[0] + start, places[0] + stop, device=device)[:, None]
    others = torch.arange(places[1] + left, places[1] + right, device=device)
    visible = (others <= own)[None]
    if mask.window:
        visible = visible & (others > own - mask.window)
    if mask.first is not None:
        visible = visible & (others >= mask.first[:, places[0] + start : places[0] + stop, None])
    return visible[:, None]


def _scores(
    q: Tensor, k: Tensor, mask: Mask, rows: slice, columns: slice, visible: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The scores of a tile by heads of the keys, and the capped ones before the mask."""
    dtype = accumulated_in(q.dtype)
    scores = _by_key(q[:, :, rows].to(dtype), k) @ k[:, :, columns].to(dtype).transpose(-2, -1) * mask.scale
    capped = None
    if mask.softcap:
        scores = capped = (scores / mask.softcap).tanh() * mask.softcap
    hidden = ~visible.repeat(1, 1, q.shape[1] // k.shape[1], 1)
    return scores.masked_fill(hidden, float("-inf")), capped


def _by_key(x: Tensor, k: Tensor) -> Tensor:
    """From (batch, heads, rows, ...) to (batch, heads of the keys, group x rows, ...)."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _by_query(x: Tensor, q: Tensor) -> Tensor:
    """From (batch, heads of the keys, group x rows, ...) to (batch, heads, rows, ...)."""
    return x.unflatten(2, (q.shape[1] // x.shape[1], -1)).flatten(1, 2)
