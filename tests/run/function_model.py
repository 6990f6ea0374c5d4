"""A model of any function of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

N = 16


class Run(nn.Module):
    """A function of a hidden tensor between two linear layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first = nn.Linear(N, N)
        self.function = function
        self.last = nn.Linear(N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(torch.tanh(self.first(x))).sin()).square().sum()


def make(function: Any = torch.exp) -> Run:
    torch.manual_seed(7)
    return Run(function)


def batch(seed: int = 3) -> torch.Tensor:
    return torch.randn(6, N, generator=torch.Generator().manual_seed(seed))
