"""GPT: pre-norm transformer with learned positions, GELU and tied embeddings. The shape of GPT-2 and GPT-3, in one readable file."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.models.common import CausalAttention, CausalOutput, Dropout, check_tokens, next_token_loss
from lowtide.models.presets import ModelConfig


class Attention(nn.Module):
    """Causal self-attention with one matrix for q, k and v."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.core = CausalAttention(config.dropout, config.fused_attention)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = (t.view(batch, sequence, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=-1))
        y = self.core(q, k, v).transpose(1, 2).reshape(batch, sequence, width)
        return self.dropout(self.out(y))


class MLP(nn.Module):
    """Two linear layers with GPT-2's tanh-approximated GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden_width)
        self.down = nn.Linear(config.hidden_width, config.width)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))


class Block(nn.Module):
    """One layer: attention, then MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The language model.

    >>> import torch
    >>> from lowtide.models import preset
    >>> model = GPT(preset("gpt-nano"))
    >>> tokens = torch.randint(256, (2, 16))
    >>> model(tokens).logits.shape
    torch.Size([2, 16, 256])
    >>> model(tokens, targets=tokens).loss.shape
    torch.Size([])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialize)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(parameter, std=0.02 * (2 * config.layers) ** -0.5)  # GPT-2: the residual stream sums 2L branches
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> CausalOutput:
        """Logits of every next token, or the loss against ``targets`` (the tokens one place later)."""
        check_tokens(tokens, self.config.positions)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return CausalOutput(None, self.head(x))
        return CausalOutput(next_token_loss(x, self.head, targets, self.config.loss_chunks), None)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
