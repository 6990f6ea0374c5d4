"""Collectives in compiled graphs are never run again: ranks that decide differently go on together."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from ranks import needs_gloo, on_ranks
from torch import nn

import lowtide

pytestmark = needs_gloo


class Reduced(nn.Module):
    """Layers whose results are summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_reduce

        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = nn.functional.gelu(second(nn.functional.gelu(first(x))))
            x = x + all_reduce(x.detach(), "sum", dist.group.WORLD)
        return x.square().mean()


def step() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model, x = Reduced(), torch.randn(256, 32)
    twin = copy.deepcopy(model)
    compiled = lowtide.compile(model, ("min", "100%")[rank], backend="aot_eager")
    for _ in range(2):
        for one, callee in ((model, compiled), (twin, twin)):
            one.zero_grad()
            callee(x).backward()
        assert all(
            torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
        )
    replayed = lowtide.handle_of(compiled).plan.replayed
    assert bool(replayed) == (rank == 0)


def test_ranks_may_decide_differently() -> None:
    on_ranks(2, step)
