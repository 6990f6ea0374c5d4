"""Programs of six layers, and their steps beside an eager twin."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.meter import peak, resident_bytes


class Program(nn.Module):
    """Six layers, two halves of three."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.register_buffer("mean", torch.zeros(32))

    def half(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for layer in self.layers[first : first + 3]:
            x = functional.gelu(layer(x))
        return x


class Plain(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.half(self.half(x, 0), 3).square().mean()


def step(model: nn.Module, callee: Any, x: torch.Tensor) -> int:
    """Forward and backward; the peak, what was resident included."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    resident = resident_bytes(model) + x.nbytes
    with peak("cpu") as seen:
        callee(x).backward()
    return resident + seen.peak_bytes


def results(model: nn.Module) -> list[torch.Tensor]:
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def run(kind: type[Program], budget: str) -> tuple[Any, int]:
    """Three steps beside an eager twin; the handle and the last peak."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(512, 32)
    twin = copy.deepcopy(model)
    compiled = lowtide.compile(model, budget, backend="aot_eager")
    for _ in range(3):
        real = step(model, compiled, x)
        step(twin, twin, x)
        assert all(map(torch.equal, results(model), results(twin)))
    handle = lowtide.handle_of(compiled)
    assert real <= handle.plan.budget_bytes + 16
    assert abs(real - handle.predicted_peak_bytes) <= 16
    return handle, real
