"""DDP and FSDP2 outside the tensor group, on a mesh of two by two: losses of the single process that has the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import needs_gloo, on_ranks
from test_models_shared import make
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowtide import parallel as lp

pytestmark = needs_gloo


def tokens(step: int) -> Tensor:
    return torch.randint(37, (4, 8), generator=torch.Generator().manual_seed(step))


def wrapped(kind: str, family: str, mesh: DeviceMesh) -> nn.Module:
    model = make(family, mesh["tp"], True)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["dp"])  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh["dp"])
    return model


def train(model: nn.Module, part: slice, group: Any = None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(4):
        batch = tokens(step)[part]
        loss = model(batch, batch).loss
        loss.backward()
        lp.allreduce_sequence_parallel_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if group is not None:
            dist.all_reduce(mean, group=group)
            mean /= 2
        losses.append(mean.item())
    return losses


def composed(kind: str, family: str) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = wrapped(kind, family, mesh)
    if kind == "fsdp":
        lp.mark_partial_gradients(model)
    rank = mesh["dp"].get_local_rank()
    return train(model, slice(2 * rank, 2 * rank + 2), mesh["dp"].get_group())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_outside_the_tensor_group(kind: str, family: str) -> None:
    expected = train(make(family), slice(None))
    for found in on_ranks(4, composed, kind, family):
        assert found == pytest.approx(expected, abs=2e-5)


def forgotten() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = wrapped("fsdp", "gpt", mesh)
    with pytest.raises(lp.ParallelError, match=r"call lowtide\.parallel\.mark_partial_gradients"):
        model(tokens(0), tokens(0))
    return True


def test_parameters_that_were_replaced_and_not_marked() -> None:
    assert all(on_ranks(4, forgotten))
