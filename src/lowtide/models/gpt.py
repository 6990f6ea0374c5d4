"""GPT: pre-norm transformer with learned positions, GELU and tied embeddings. The shape of GPT-2 and GPT-3,
in one readable file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.models.common import CausalAttention, CausalOutput, Dropout, check_tokens, join_heads
from lowtide.models.presets import ModelConfig, check_config
from lowtide.models.shared import Sharing, fill, is_embedding, is_linear


class Attention(nn.Module):
    """Causal self-attention with one matrix for q, k and v."""

    def __init__(self, config: ModelConfig, sharing: Sharing) -> None:
        super().__init__()
        self.heads = sharing.heads(config.heads)
        self.qkv = sharing.widen(config.width, 3 * config.width, blocks=3)
        self.core = CausalAttention(config.dropout, config.fused_attention, sharing)
        self.out = sharing.narrow(config.width, config.width)
        self.dropout = Dropout(config.dropout, sharing, sharing.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        batch, sequence, width = qkv.shape
        q, k, v = (
            t.view(batch, sequence, self.heads, -1).transpose(1, 2) for t in qkv.split(width // 3, dim=-1)
        )
        return self.dropout(self.out(join_heads(self.core(q, k, v), like=qkv)))


class MLP(nn.Module):
    """Two linear layers with GPT-2's tanh-approximated GELU between them."""

    def __init__(self, config: ModelConfig, sharing: Sharing) -> None:
        super().__init__()
        self.up = sharing.widen(config.width, config.hidden_width)
        self.down = sharing.narrow(config.hidden_width, config.width)
        self.dropout = Dropout(config.dropout, sharing, sharing.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))


class Block(nn.Module):
    """One layer: attention, then MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, sharing: Sharing) -> None:
        super().__init__()
        self.norm1 = sharing.layer_norm(config.width)
        self.attention = Attention(config, sharing)
        self.norm2 = sharing.layer_norm(config.width)
        self.mlp = MLP(config, sharing)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The language model.

    Args:
        config: its shape.
        group: the ranks that share every layer, as `lowtide.parallel.tensor_group` takes them; ``None`` is
            one process alone. Every rank gives the same tokens and gets the same loss.
        sequence_parallel: between the linear layers each rank holds its piece of the sequence, which must
            divide.

    >>> import torch
    >>> from lowtide.models import preset
    >>> model = GPT(preset("gpt-nano"))
    >>> tokens = torch.randint(256, (2, 16))
    >>> model(tokens).logits.shape
    torch.Size([2, 16, 256])
    >>> model(tokens, targets=tokens).loss.shape
    torch.Size([])
    """

    def __init__(self, config: ModelConfig, group: Any = None, sequence_parallel: bool = False) -> None:
        check_config("GPT", config)
        super().__init__()
        self.config = config
        self.sharing = sharing = Sharing(group, sequence_parallel)
        self.tokens = sharing.embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.dropout = Dropout(config.dropout, sharing, sequence_parallel)
        self.blocks = nn.ModuleList(Block(config, sharing) for _ in range(config.layers))
        self.norm = sharing.layer_norm(config.width)
        self.head = sharing.head(config.width, config.vocabulary, config.loss_chunks)
        self.apply(_initialize)
        for block in self.blocks:
            for layer in (block.attention.out, block.mlp.down):  # type: ignore[union-attr]
                # GPT-2: the residual stream sums 2L branches
                std = 0.02 * (2 * config.layers) ** -0.5
                fill(layer, "weight", lambda w, std=std: nn.init.normal_(w, std=std))  # type: ignore
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
        places, tokens = self.sharing.places(tokens), self.sharing.own(tokens)
        return self.dropout(self.tokens(tokens) + self.sharing.piece(self.positions(places)))

    def run_blocks(self, x: Tensor) -> Tensor:
        """The layers that this module holds."""
        for block in self.blocks.children():
            x = block(x)
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of what the final norm gave."""
        return self.sharing.loss(x, self.head, targets, self.config.vocabulary)


def _initialize(module: nn.Module) -> None:
    if is_linear(module) or is_embedding(module):
        fill(module, "weight", lambda weight: nn.init.normal_(weight, std=0.02))
    if is_linear(module) and module.bias is not None:
        fill(module, "bias", nn.init.zeros_)
