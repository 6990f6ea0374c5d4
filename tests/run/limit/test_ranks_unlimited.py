"""A limit on some of the ranks of a step: the ranks without one are named, before anything is exchanged."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import meter
from lowtide import parallel as lp
from lowtide.extensions.ranks import ranks as exchanging

pytestmark = [
    on_each_backend,
    pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator"),
]
WAYS = ("pipeline", "tensor-parallel", "ddp", "fsdp")


def model_of(way: str) -> Any:
    if way == "pipeline":
        stage = pipelining.PipelineStage(nn.Linear(8, 8), dist.get_rank(), 2, torch.get_default_device())
        return pipelining.Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    if way == "tensor-parallel":
        up: nn.Module = lp.ColumnParallelLinear(8, 16, gather_output=False)
        return nn.Sequential(up, nn.GELU(), lp.RowParallelLinear(16, 8, input_is_parallel=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return DistributedDataParallel(model) if way == "ddp" else fully_shard(model)


def step_of(way: str, limited: bool) -> str:
    """What a first step raises: of rank 0, which alone has a limit, or of all."""
    model, x, rank = model_of(way), torch.randn(4, 8), dist.get_rank()
    if limited or rank == 0:
        lowtide.limit_memory(model, "100%")
    try:
        if way == "pipeline":
            model.step(*(() if rank else (x,)), **({"target": x} if rank else {}), return_outputs=False)
        else:
            model(x).square().sum().backward()
    except lowtide.PlanError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def alone() -> list[str]:
    with patch.object(exchanging, "BEHIND_SECONDS", 0.5):
        return [step_of(way, limited) for limited in (False, True) for way in WAYS]


def test_ranks_without_a_limit_are_named() -> None:
    first, second = on_ranks(2, alone)
    for text in first[: len(WAYS)]:
        assert "rank 1 has no memory limit" in text and "on every rank, or on none" in text
    assert not any(first[len(WAYS) :]) and not any(second)
