"""Llama: pre-norm transformer with RMSNorm, rotary positions, grouped-query attention and SwiGLU, in one readable file."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.models.common import CausalAttention, CausalOutput, Dropout, check_tokens, next_token_loss
from lowtide.models.presets import ModelConfig


def rotary_table(positions: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's rotation angles, each of shape (positions, head_width)."""
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + d/2]) of the last dimension by its position's angle (arXiv 2104.09864, as Llama pairs them)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        shared = config.key_value_heads * self.head_width
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, shared, bias=False)
        self.v = nn.Linear(config.width, shared, bias=False)
        self.core = CausalAttention(config.dropout, config.fused_attention)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = (f(x).view(batch, sequence, -1, self.head_width).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden_width, bias=False)
        self.up = nn.Linear(config.width, config.hidden_width, bias=False)
        self.down = nn.Linear(config.hidden_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention, then MLP, each behind an RMS norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.mlp = MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Llama(nn.Module):
    """The language model.

    >>> import torch
    >>> from lowtide.models import preset
    >>> model = Llama(preset("llama-nano"))
    >>> model(torch.randint(256, (2, 16))).logits.shape
    torch.Size([2, 16, 256])
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        cos, sin = rotary_table(config.positions, config.width // config.heads, config.rotary_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> CausalOutput:
        """Logits of every next token, or the loss against ``targets`` (the tokens one place later)."""
        check_tokens(tokens, self.config.positions)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        if targets is None:
            return CausalOutput(None, self.head(x))
        return CausalOutput(next_token_loss(x, self.head, targets, self.config.loss_chunks), None)
