"""Collectives in compiled graphs are never run again: ranks that decide differently go on together."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import lowtide

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs Gloo")


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


def step(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
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
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_may_decide_differently(tmp_path: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(step, (str(tmp_path / "store"),), nprocs=2)
