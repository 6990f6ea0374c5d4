"""PyTorch's flash attention as operations that also return each row's log-sum-exp, with which parts of a
softmax are merged.

Seen in PyTorch 2.11 to 2.13. On a card the kernels take 16-bit tensors with heads of up to 256 features; on
the CPU all floating-point dtypes. Both take fewer heads of keys and values than of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ON_CARD = (torch.float16, torch.bfloat16)
_MOST_FEATURES = 256


def is_attention_replaced() -> bool:
    """Whether ``torch.nn.functional.scaled_dot_product_attention`` is another function than PyTorch's, as in
    PyTorch's own context manager for context parallelism.
    """
    own = torch._C._nn.scaled_dot_product_attention  # pyright: ignore
    return torch.nn.functional.scaled_dot_product_attention is not own


def has_flash_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take tensors of these sizes, dtypes and devices."""
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return q.is_floating_point()
    width = q.shape[-1]
    return q.device.type == "cuda" and q.dtype in _ON_CARD and width <= _MOST_FEATURES and width % 8 == 0


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exp of each row.

    Args:
        q, k, v: (batch, heads, sequence, features); heads of ``k`` and ``v`` divide those of ``q``.
        causal: each row sees the columns up to its own number.
        scale: of the scores.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``. ``out`` and ``lse`` may be those of more columns than ``k`` has:
    the gradients are then these columns' part.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # states of a dropout that is off
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
    )
