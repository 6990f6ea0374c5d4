"""What the GPT and the Llama have in common: the output, dropout with a one-byte mask, and attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.models.presets import ModelError
from lowtide.models.shared import Sharing, next_token_loss

__all__ = ["CausalAttention", "CausalOutput", "Dropout", "check_tokens", "join_heads", "next_token_loss"]


class CausalOutput(NamedTuple):
    """What a causal language model returns.

    Attributes:
        loss: mean cross entropy over the targets, or ``None`` without targets.
        logits: scores of the next token, or ``None`` with targets: whoever holds on to an output would pin
            the largest tensor of the step.
    """

    loss: Tensor | None
    logits: Tensor | None


class Dropout(nn.Module):
    """Dropout whose mask takes one byte an element on every device.

    ``F.dropout`` on the CPU keeps its mask in the activation's own dtype, four times as large in float32.

    Args:
        probability: of an element to be dropped.
        sharing: the ranks that share the model.
        sharded: the input is this rank's own part, so its random numbers are its own.
    """

    def __init__(self, probability: float, sharing: Sharing | None = None, sharded: bool = False) -> None:
        super().__init__()
        self.probability = probability
        self.sharing = sharing or Sharing()
        self.sharded = sharded

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x
        with self.sharing.own_random_numbers(x, self.sharded):
            return torch.native_dropout(x, self.probability, True)[0]

    def extra_repr(self) -> str:
        return f"{self.probability}"


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v under a causal mask, over tensors of shape (batch, heads, sequence, head
    width).

    ``fused`` is PyTorch's own kernel, which keeps only a row statistic for backward. Unfused, every step is
    an operation of its own and the quadratic score matrix is kept: the "core attention" that selective
    recomputation was made for (arXiv 2205.05198, section 4).
    """

    def __init__(self, dropout: float = 0.0, fused: bool = True, sharing: Sharing | None = None) -> None:
        super().__init__()
        self.fused = fused
        self.sharing = sharing or Sharing()
        self.dropout = Dropout(dropout, sharing, sharded=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend; ``k`` and ``v`` may have fewer heads than ``q``, each shared by a group of query heads."""
        context = self.sharing.context
        if context is None:
            return self._attend(q, k, v)
        if self.fused and not (self.training and self.dropout.probability):
            return context.attend_causally(q, k, v)
        why = "dropout in attention" if self.fused else "attention that is not fused"
        return context.attend_with(self._attend, q, k, v, why)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if self.fused and not (self.training and self.dropout.probability):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if self.fused and q.device.type != "cpu":
            with self.dropout.sharing.own_random_numbers(q, sharded=True):
                return F.scaled_dot_product_attention(
                    q, k, v, dropout_p=self.dropout.probability, is_causal=True
                )
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        # a sum, of which autograd keeps nothing; filling under a mask would keep the mask
        future = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype, device=q.device).triu(1)
        weights = (scores + future).softmax(dim=-1)
        return self.dropout(weights).to(v.dtype) @ v


def join_heads(y: Tensor, like: Tensor) -> Tensor:
    """(batch, heads, sequence, head width) to (batch, sequence, features), in one copy that lies in memory as
    ``like`` does.
    """
    if like.stride(0) < like.stride(1):  # the sequence is outermost, as it travels between ranks
        return y.permute(2, 0, 1, 3).flatten(2).transpose(0, 1)
    return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)


def check_tokens(tokens: Tensor, positions: int) -> None:
    """Raise a `ModelError` unless ``tokens`` is (batch, sequence) with at most ``positions`` of them in a
    row.
    """
    if tokens.ndim != 2:
        raise ModelError(f"tokens must have the shape (batch, sequence), not {tuple(tokens.shape)}")
    if tokens.shape[1] > positions:
        raise ModelError(
            f"a sequence of {tokens.shape[1]} tokens is longer than the model's {positions} positions"
        )
