"""A model of DTensors on a mesh, as others build them (`parallelize_module`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LAYERS, WORDS = 64, 4, 2, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(nn.functional.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second, self.mlp = nn.LayerNorm(WIDTH), Mlp(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    def __init__(self, dropout: float, checkpoints: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.head, self.checkpoints = nn.Linear(WIDTH, WORDS, bias=False), checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens.roll(-1, 1).flatten())


MLP = {"mlp.up": ColwiseParallel()}
ATTENTION = {f"attention.{name}": ColwiseParallel() for name in "qkv"}


def make(sequence: bool, dropout: float = 0.0, checkpoints: bool = False, mesh: Any = None) -> nn.Module:
    """With sequence parallelism the loss is a DTensor (``loss_parallel``)."""
    torch.manual_seed(0)
    model, mesh = Model(dropout, checkpoints), mesh or init_device_mesh(torch.get_default_device().type, (2,))
    rows = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    plan: dict[str, Any] = {**ATTENTION, **MLP, "attention.out": rows, "mlp.down": rows}
    if sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"first": SequenceParallel(), "second": SequenceParallel(), "attention": whole, "mlp": whole}
        ends: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh, ends)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model
