"""What the GPT and the Llama share: the output, dropout with a one-byte mask, attention, and the loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.models.presets import ModelError


class CausalOutput(NamedTuple):
    """What a causal language model returns.

    Attributes:
        loss: mean cross entropy over the targets, or ``None`` without targets.
        logits: scores of the next token, or ``None`` with targets: whoever holds on to an output would pin the largest tensor of the step.
    """

    loss: Tensor | None
    logits: Tensor | None


class Dropout(nn.Module):
    """Dropout whose mask takes one byte an element on every device.

    ``F.dropout`` on the CPU keeps its mask in the activation's own dtype, four times as large in float32.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x
        return torch.native_dropout(x, self.probability, True)[0]

    def extra_repr(self) -> str:
        return f"{self.probability}"


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v under a causal mask, over tensors of shape (batch, heads, sequence, head width).

    ``fused`` is PyTorch's own kernel, which keeps only a row statistic for backward. Unfused, every step is an operation of its own and the
    quadratic score matrix is kept: the "core attention" that selective recomputation was made for (arXiv 2205.05198, section 4).
    """

    def __init__(self, dropout: float = 0.0, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.dropout = Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend; ``k`` and ``v`` may have fewer heads than ``q``, each shared by a group of query heads."""
        groups = q.shape[1] // k.shape[1]
        if self.fused and not (self.training and self.dropout.probability):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if self.fused and q.device.type != "cpu":
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.probability, is_causal=True)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.dropout(weights).to(v.dtype) @ v


def next_token_loss(hidden: Tensor, head: nn.Module, targets: Tensor, chunks: int = 1) -> Tensor:
    """The mean cross entropy of ``head(hidden)`` against ``targets``, in float32.

    With ``chunks`` above 1 the tokens go through the head in that many pieces. The logits of a piece are all that backward needs at a time,
    so a plan that recomputes them lowers the floor that the full logits set (many tokens times a large vocabulary).
    """
    tokens, labels = hidden.flatten(0, -2), targets.flatten()
    if chunks == 1:
        return F.cross_entropy(head(tokens).float(), labels)
    total = hidden.new_zeros((), dtype=torch.float32)
    for piece, piece_labels in zip(tokens.chunk(chunks), labels.chunk(chunks), strict=True):
        total = total + F.cross_entropy(head(piece).float(), piece_labels, reduction="sum")
    return total / labels.numel()


def check_tokens(tokens: Tensor, positions: int) -> None:
    """Raise a `ModelError` unless ``tokens`` is (batch, sequence) with at most ``positions`` of them in a row."""
    if tokens.ndim != 2:
        raise ModelError(f"tokens must have the shape (batch, sequence), not {tuple(tokens.shape)}")
    if tokens.shape[1] > positions:
        raise ModelError(f"a sequence of {tokens.shape[1]} tokens is longer than the model's {positions} positions")
