"""Small models that several tests limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.meter import available

N = 16

needs_meter = pytest.mark.skipif(not available(), reason="needs a C++ compiler for the counting allocator")


class Small(nn.Module):
    """A few layers and a loss."""

    def __init__(self, width: int = N, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layer(width, dropout) for _ in range(layers)])

    @staticmethod
    def layer(width: int, dropout: float) -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Documented."""
        for layer in self.layers:
            x = x + layer(x) * scale
        return x.square().mean()


class Block(nn.Module):
    """Two layers and what is cheap to compute again, around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 64)
        self.back = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.sin(self.wide(x)).sigmoid())


def small(**options: Any) -> Small:
    torch.manual_seed(5)
    return Small(**options)  # a batch of 100 rows takes several times what its weights take


def batch(rows: int = 100, width: int = N) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3))
