"""Llama: pre-norm transformer with RMSNorm, rotary positions, grouped-query attention and SwiGLU, in one
readable file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.models.common import CausalAttention, CausalOutput, Dropout, check_tokens, join_heads
from lowtide.models.presets import ModelConfig, check_config
from lowtide.models.shared import Sharing, fill, is_embedding, is_linear


def rotary_table(positions: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's rotation angles, each of shape (positions, head_width)."""
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + d/2]) of the last dimension by its position's angle (arXiv 2104.09864, as
    Llama pairs them).
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head."""

    def __init__(self, config: ModelConfig, sharing: Sharing) -> None:
        super().__init__()
        sharing.heads(config.heads)
        self.sharing = sharing
        self.head_width = config.width // config.heads
        self.q = sharing.widen(config.width, config.width, bias=False)
        self.k = sharing.heads_in(config.width, config.key_value_heads, self.head_width, bias=False)
        self.v = sharing.heads_in(config.width, config.key_value_heads, self.head_width, bias=False)
        self.core = CausalAttention(config.dropout, config.fused_attention, sharing)
        self.out = sharing.narrow(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        projected = self.sharing.together(x, self.q, self.k, self.v)
        q, k, v = (t.view(*t.shape[:2], -1, self.head_width).transpose(1, 2) for t in projected)
        y = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(join_heads(y, like=projected[0]))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, sharing: Sharing) -> None:
        super().__init__()
        self.sharing = sharing
        self.gate = sharing.widen(config.width, config.hidden_width, bias=False)
        self.up = sharing.widen(config.width, config.hidden_width, bias=False)
        self.down = sharing.narrow(config.hidden_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.sharing.together(x, self.gate, self.up)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention, then MLP, each behind an RMS norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, sharing: Sharing) -> None:
        super().__init__()
        self.norm1 = sharing.rms_norm(config.width, config.norm_epsilon)
        self.attention = Attention(config, sharing)
        self.norm2 = sharing.rms_norm(config.width, config.norm_epsilon)
        self.mlp = MLP(config, sharing)
        self.dropout = Dropout(config.dropout, sharing, sharing.sequence_parallel)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Llama(nn.Module):
    """The language model.

    Args:
        config: its shape.
        group: the ranks that share every layer, as `lowtide.parallel.tensor_group` takes them; ``None`` is
            one process alone. Every rank gives the same tokens and gets the same loss.
        sequence_parallel: between the linear layers each rank holds its piece of the sequence, which must
            divide.

    >>> import torch
    >>> from lowtide.models import preset
    >>> model = Llama(preset("llama-nano"))
    >>> model(torch.randint(256, (2, 16))).logits.shape
    torch.Size([2, 16, 256])
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, group: Any = None, sequence_parallel: bool = False) -> None:
        check_config("Llama", config)
        super().__init__()
        self.config = config
        self.sharing = sharing = Sharing(group, sequence_parallel)
        self.tokens = sharing.embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, sharing) for _ in range(config.layers))
        self.norm = sharing.rms_norm(config.width, config.norm_epsilon)
        self.head = sharing.head(config.width, config.vocabulary, config.loss_chunks)
        cos, sin = rotary_table(config.positions, config.width // config.heads, config.rotary_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for module in self.modules():
            if is_linear(module) or is_embedding(module):
                fill(module, "weight", lambda weight: nn.init.normal_(weight, std=0.02))
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> CausalOutput:
        """Logits of every next token, or the loss against ``targets`` (the tokens one place later)."""
        x = self.norm(self.run_blocks(self.embed(tokens)))
        vocabulary = self.config.vocabulary
        if targets is None:
            return CausalOutput(None, self.sharing.logits(self.head(x), vocabulary))
        return CausalOutput(self.loss(x, targets), None)

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first layer sees of tokens."""
        check_tokens(tokens, self.config.positions)
        return self.tokens(self.sharing.own(tokens))

    def run_blocks(self, x: Tensor) -> Tensor:
        """The layers that this module holds."""
        sequence = x.shape[1] * (self.sharing.size if self.sharing.sequence_parallel else 1)
        cos, sin = (self.sharing.rows(table, sequence) for table in (self.cos, self.sin))
        for block in self.blocks.children():
            x = block(x, cos, sin)
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of what the final norm gave."""
        return self.sharing.loss(x, self.head, targets, self.config.vocabulary)
