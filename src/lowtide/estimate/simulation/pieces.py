"""One rank's part of a model: the layers of one pipeline chunk, with the embedding before or the output layer
behind them.

The parts are those of the project's own GPT and Llama (`lowtide.models`), written on the parallel layers, so
that what is traced is what runs. A piece can be built on fake tensors at any size, or for real.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowtide.estimate.config import Config
from lowtide.estimate.errors import EstimateError
from lowtide.models.gpt import GPT
from lowtide.models.llama import Llama
from lowtide.models.presets import ModelConfig

DTYPES = {
    "bf16": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "autocast": torch.float32,
}


def model_config(config: Config, layers: int) -> ModelConfig:
    """The built-in model of a configuration's shape, with some of its layers.

    Raises:
        EstimateError: neither the GPT nor the Llama has this shape.
    """
    shape = config.model
    gpt = (shape.mlp, shape.norm, shape.positions, shape.bias, shape.kv_heads) == (
        "gelu",
        "layernorm",
        "learned",
        True,
        shape.heads,
    )
    llama = (shape.mlp, shape.norm, shape.positions, shape.bias) == ("swiglu", "rmsnorm", "rotary", False)
    llama = llama and not shape.qkv_bias and not shape.qk_norm and not shape.experts and not shape.kv_latent
    if not (gpt or llama) or shape.parallel or shape.more or shape.head_width * shape.heads != shape.hidden:
        raise EstimateError(
            "simulate runs the project's GPT (gelu, layernorm, learned positions, biases) and Llama "
            "(swiglu, rmsnorm, rotary positions, no biases), or a Hugging Face configuration at --tp 1 --pp "
            "1 as transformers builds it; this shape is neither"
        )
    return ModelConfig(
        family="gpt" if gpt else "llama", layers=layers, width=shape.hidden, heads=shape.heads,
        hidden_width=shape.ffn, key_value_heads=shape.kv_heads, vocabulary=shape.vocab,
        positions=max(shape.sequence, config.seq), tied=shape.tied, dropout=config.dropout,
        fused_attention=config.fused_attention,
        loss_chunks=config.chunks if config.loss == "chunked-forward" else 1,
    )  # fmt: skip


class Piece(nn.Module):
    """A chunk of a model.

    Args:
        config: the whole configuration.
        first, last: whether the embedding is before these layers, and the output layer behind them.
        group: the tensor-parallel ranks, ``None`` for one process.
        context: the ranks that share sequences, or ``None``.
        layers: how many; the configuration's share of a chunk where ``None``.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: Config,
        *,
        first: bool,
        last: bool,
        group: Any = None,
        context: Any = None,
        layers: int | None = None,
    ) -> None:
        super().__init__()
        count = config.model.layers // (config.pp * config.interleave) if layers is None else layers
        settings = model_config(config, count)
        build = GPT if settings.family == "gpt" else Llama
        model: Any = build(settings, group, config.sequence_parallel)
        self.first, self.last = first, last
        self.rotary = settings.family == "llama"
        self.vocabulary = settings.vocabulary
        self.sharing = model.sharing
        self.sharing.share_context(context)
        self.blocks = model.blocks
        if first:
            self.tokens = model.tokens
            if not self.rotary:
                self.positions, self.dropout = model.positions, model.dropout
        if last:
            self.norm, self.head = model.norm, model.head
        if self.rotary:
            self.register_buffer("cos", model.cos, persistent=False)
            self.register_buffer("sin", model.sin, persistent=False)
        if config.fused_attention and config.dropout:
            for block in self.blocks:
                block.attention.core.dropout.probability = 0.0  # type: ignore[union-attr]

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens (on the first piece) or hidden states in; hidden states, or the loss (on the last one)
        out.
        """
        if self.first:
            places, x = self.sharing.places(x), self.tokens(self.sharing.own(x))
            if not self.rotary:
                x = self.dropout(x + self.sharing.piece(self.positions(places)))
        sequence = x.shape[1] * (self.sharing.size if self.sharing.sequence_parallel else 1)
        tables = [self.sharing.rows(one, sequence) for one in (self.cos, self.sin)] if self.rotary else []
        for block in self.blocks:
            x = block(x, *tables)
        if not self.last:
            return x
        assert targets is not None
        return self.sharing.loss(self.norm(x), self.head, targets, self.vocabulary)


def hidden_shape(config: Config) -> tuple[int, int, int]:
    """Shape of what travels between stages, on one rank."""
    return (config.micro_batch, config.seq // config.cp // config.replication, config.model.hidden)
