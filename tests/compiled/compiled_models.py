"""Models that are compiled in one graph or several, and what a step of them takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowtide.meter import peak, resident_bytes


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, layers: int = 3, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def real_peak(compiled: nn.Module, model: nn.Module, x: torch.Tensor) -> int:
    """What a step takes, by the allocator's own count, with what stands before it."""
    model.zero_grad(set_to_none=True)
    resident = resident_bytes(model) + x.nbytes
    with peak("cpu") as seen:
        compiled(x).backward()
    return seen.peak_bytes + resident


class Residual(nn.Module):
    """Blocks of two products without norms; it returns its loss, or what the loss is made of."""

    def __init__(self, returns_loss: bool = True, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(layers)
        )
        self.returns_loss = returns_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean() if self.returns_loss else x


class Broken(Model):
    """A graph break in the middle; the loss is in the second graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x)
        torch._dynamo.graph_break()
        for block in self.blocks[half:]:
            x = block(x)
        return x.square().mean()


class Open(Model):
    """No loss inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Embedded(Open):
    """Something runs eagerly before and after the blocks."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.tokens, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(self.tokens(x)))


class Behind(Model):
    """A graph that returns the loss, behind layers that run eagerly."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.eager = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch._dynamo.disable(self.eager)(x))


class Handed(nn.Module):
    """The second graph alone holds what it is given, and lets go of it long before its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return (self.down(self.up(x + 1).relu()) * x).mean()


def squared(y: torch.Tensor) -> torch.Tensor:
    return y if y.dim() == 0 else y.square().mean()
