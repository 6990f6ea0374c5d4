"""A model whose blocks run in checkpointing scopes, for the tests of scopes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide

N = 16


def batch() -> torch.Tensor:
    return torch.randn(6, N, generator=torch.Generator().manual_seed(3))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(N), nn.Linear(N, 4 * N), nn.Linear(4 * N, N)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks, each in a scope when asked to be."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp() for _ in range(layers)])
        self.scoped: Any = lambda k: True
        self.policy: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks):
            if self.scoped(k):
                with lowtide.checkpointing(policy=self.policy):
                    x = block(x)
            else:
                x = block(x)
        return x.square().mean()


def grads(model: nn.Module, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(batch() if x is None else x).backward()
    return [p.grad.clone() for p in model.parameters()]


def make(layers: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack(layers)


class Log(TorchDispatchMode):
    """The names of the operations that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removeprefix("aten.").removesuffix(".default"))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(n == name or n.startswith(name + ".") for n in self.names)


def backward(loss: torch.Tensor) -> Log:
    with Log() as log:
        loss.backward()
    return log
