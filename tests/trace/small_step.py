"""A small model that touches what a trace has to put back, and its batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.graph import StepGraph

N = 16


class Model(nn.Module):
    """Caches a tensor on itself, counts in a buffer, draws random numbers, normalizes over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(N, 4 * N), nn.Linear(4 * N, N)
        self.norm, self.drop = nn.BatchNorm1d(4 * N), nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(()))
        self.cache: torch.Tensor | None = None
        self.log: list[int] = []
        self.table = {"scale": torch.full((N,), 2.0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.cache = x.detach() * 2
        h = self.drop(F.gelu(self.norm(self.first(x))))
        return (self.last(h) * self.table["scale"] + torch.randn(N)).square().mean()


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def batch() -> torch.Tensor:
    return torch.randn(8, N, generator=torch.Generator().manual_seed(3))


def names(graph: StepGraph, phase: str) -> list[str]:
    return [o.name.removeprefix("aten.").split(".")[0] for o in graph.operations if o.phase == phase]
