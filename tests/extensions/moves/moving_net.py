"""A small model with dropout, its steps, and policies that move what it saves and lose nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide import policies
from lowtide.graph import StepGraph
from lowtide.plan.data import Offload, Plan

torch.set_num_threads(1)


class Block(nn.Module):
    """A residual block with dropout and either activation."""

    def __init__(self, width: int, relu: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.drop = nn.Dropout(0.1)
        self.act = nn.ReLU() if relu else nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.drop(self.act(self.up(self.norm(x))))))


class Net(nn.Module):
    """A few blocks and a loss."""

    def __init__(self, layers: int = 5, width: int = 48, relu: bool = False) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width, relu) for _ in range(layers))
        self.out = nn.Linear(width, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return self.out(x).square().mean()


X = torch.randn(200, 48, generator=torch.Generator().manual_seed(5))


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def step(model: nn.Module, x: torch.Tensor = X, seed: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(x)
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )


def both(recompute: str, **options: Any) -> Callable[[StepGraph, int | None], Plan]:
    """A policy that recomputes as another one does and moves what that one keeps."""

    def policy(graph: StepGraph, budget: int | None = None) -> Plan:
        kept = lowtide.plan(graph, policy=recompute).stored
        moves = {v: Offload("disk") if k % 2 else Offload("host") for k, v in enumerate(sorted(kept))}
        return policies.make_plan(graph, stored=kept, policy="both", moves=moves, budget=budget)

    return policy


LOSSLESS = {
    "disk": policies.offload("disk", min_bytes=1),
    "host": policies.offload("host", min_bytes=1),
    "masks": policies.compress("auto", min_bytes=1),
    "masks on disk": policies.compress("auto", min_bytes=1, then=Offload("disk")),
    "full, then disk and host": both("full"),
}


def check_same_steps(plain: nn.Module, limited: nn.Module, batch: dict[str, Any], steps: int) -> None:
    """Loss, gradients and buffers of a Hugging Face model and its limited twin, bit by bit and without a
    warning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        for seed in range(steps):
            found = []
            for which in (plain, limited):
                which.zero_grad()
                torch.manual_seed(seed)
                loss = which(**batch).loss
                loss.backward()
                gradients = [p.grad.clone() for p in which.parameters() if p.grad is not None]
                found.append([loss.detach(), *gradients, *(b.clone() for b in which.buffers())])
            assert same(*found)
