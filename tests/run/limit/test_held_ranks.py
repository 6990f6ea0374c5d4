"""Steps that differ from one to the next are held on ranks, too, under each way to share a model: bit by bit
what they compute without a limit, and one number as the budget of all ranks.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.sharded import collectives_finish
from ranks import TIDY_SECONDS, on_each_backend, on_ranks
from sharded_step_models import Block, Model, batch, local, sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide
from lowtide import meter

pytestmark = [on_each_backend, pytest.mark.skipif(not meter.available(), reason="needs the CPU's meter")]
STEPS, BLOCKS = 9, 5
NEAR_BYTES = 16 << 10  # so near to the meter's peak is the one that the handle reports


class Idle(Block):
    """A block that runs on some steps, or on some ranks: where it does not, its collectives are matched."""

    runs, matches = True, True

    def forward(self, x: Tensor) -> Tensor:
        if self.runs:
            return super().forward(x)
        return x + 0 * sum(parameter.sum() for parameter in self.parameters()) if self.matches else x


class Deep(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Idle() for _ in range(BLOCKS))


def mesh(*sizes: int) -> Any:
    names = ("outer", "inner")[: len(sizes)]
    return init_device_mesh(torch.get_default_device().type, sizes, mesh_dim_names=names)


def tensor_parallel() -> Any:
    model: Any = Deep()
    for block in model.blocks:
        block.matches = False  # what a rank has not run, no other waits for
        parallelize_module(block.mlp, mesh(2), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


WAYS: dict[str, Callable[[], Any]] = {
    "FSDP2": lambda: sharded(Deep()),
    "HSDP": lambda: sharded(Deep(), mesh=mesh(2, 1)),
    "tensor parallelism": tensor_parallel,
    "DDP": lambda: nn.parallel.DistributedDataParallel(Deep()),
}


def bucket_bytes(model: Any) -> int:
    """What DDP reduces gradients in, from before the first step on."""
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    return sum(parameter.nbytes for parameter in model.parameters()) if is_ddp else 0


def runs(number: int, block: int, apart: bool) -> bool:
    """Whether a block runs in a step: in the first, then by chance on all ranks or on one."""
    by = random.Random(f"{number} {block}")
    return not number or (by.randrange(2) == dist.get_rank() if apart else by.random() < 0.6)


def trained(model: Any, apart: bool, handle: Any = None) -> tuple[list[Tensor], list[int], list[int | None]]:
    """Losses and gradients of a few steps, the peak of each as a meter reads it, and as the handle does."""
    found, peaks, told = list[Tensor](), list[int](), list[int | None]()
    blocks = getattr(model, "module", model).blocks
    for number in range(STEPS):
        model.zero_grad()
        for place, block in enumerate(blocks):
            block.runs = runs(number, place, apart)
        x = batch(number if blocks[0].matches else 0)
        time.sleep(20 * TIDY_SECONDS)  # a thread that lets go within the step would take from its peak
        resident = meter.resident_bytes(model) + x.nbytes + bucket_bytes(model)
        with meter.peak(torch.get_default_device()) as seen:
            loss = model(x)
            loss.backward()
        peaks.append(resident + seen.peak_bytes)
        told.append(None if handle is None else handle.measured_peak_bytes)
        found += [
            loss.detach().clone(),
            *(local(p.grad).clone() for p in model.parameters() if p.grad is not None),
        ]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return found, peaks, told


def held(way: str, apart: bool) -> None:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    with collectives_finish(), meter.peak(torch.get_default_device()):  # which sees all that steps free
        expected, plain, _ = trained(WAYS[way](), apart)
        largest = torch.tensor(max(plain))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        for budget in (int(0.7 * int(largest)), "75%"):
            model = WAYS[way]()
            handle = lowtide.limit_memory(model, budget, progress=False)
            found, peaks, told = trained(model, apart, handle)
            same = len(found) == len(expected) and all(map(torch.equal, found, expected))
            assert same, f"{way}, {budget}: other bits than without a limit"
            for peak, one in zip(peaks, told, strict=True):
                assert one is not None and abs(one - peak) <= NEAR_BYTES, (way, budget, peaks, told)
            limit = handle.budget_bytes
            assert limit is not None
            known = peaks[way == "DDP" :]  # the first step is the first to show what DDP holds
            assert max(known) <= limit, (way, budget, [peak / limit for peak in peaks])
            limits: list[Any] = [None, None]
            dist.all_gather_object(limits, limit)
            assert limits[0] == limits[1], (way, budget, limits)
            handle.remove()


@pytest.mark.parametrize("way", WAYS)
def test_blocks_that_run_on_some_steps_only(way: str) -> None:
    on_ranks(2, held, way, False)


@pytest.mark.parametrize(
    "way", ["FSDP2", *(pytest.param(way, marks=pytest.mark.slow) for way in ("HSDP", "DDP"))]
)
def test_blocks_that_run_on_one_rank_only(way: str) -> None:
    on_ranks(2, held, way, True)
