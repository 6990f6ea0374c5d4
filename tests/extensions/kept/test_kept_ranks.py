"""Kept plans of several ranks: all of them use theirs, or none does."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks, seeded
from small_model import batch, small
from torch import nn
from torch.distributed import pipelining

import lowtide
from restart import Log

pytestmark = on_each_backend


def wrapped(kind: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = small()
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gradients(model: nn.Module, rows: int, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(batch(rows + dist.get_rank())).backward()
    return [local(p.grad).clone() for p in model.parameters() if p.grad is not None]


def run(kind: str, folder: Path, budget: str, sizes: list[int]) -> dict[str, Any]:
    """What a run of this rank saw: steps that were profiled, its bits, its peaks, what was said."""
    log = Log()
    logger = logging.getLogger("lowtide")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    twin, model = wrapped(kind), wrapped(kind)
    handle = lowtide.limit_memory(model, budget, plans=folder)
    same, over = True, []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", lowtide.LowtideWarning)
        for seed, rows in enumerate(sizes):
            same &= all(map(torch.equal, gradients(twin, rows, seed), gradients(model, rows, seed)))
            over.append((handle.measured_peak_bytes or 0) - (handle.budget_bytes or 0))
    handle.remove()
    logger.removeHandler(log)
    texts = [str(one.message) for one in said if "are not used" in str(one.message)]
    return {"profiled": sum("profiled" in x for x in log.lines), "same": same, "over": over, "said": texts}


def restarted(kind: str, folder: Path, budget: str) -> list[dict[str, Any]]:
    sizes = [64, 128, 128, 128, 64]
    found = [run(kind, folder, budget, sizes) for _ in range(2)]
    dist.barrier()
    if dist.get_rank() == 1:
        for file in folder.glob("*-rank1of2.jsonl"):
            file.write_text(file.read_text()[:5000])
    dist.barrier()
    return [*found, *(run(kind, folder, budget, sizes) for _ in range(2))]


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        ("ddp", "90%"),
        ("fsdp", "min"),
        pytest.param("ddp", "min", marks=pytest.mark.slow),
        pytest.param("fsdp", "90%", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_use_theirs_or_none_does(tmp_path: Path, kind: str, budget: str) -> None:
    for rank, (first, second, third, fourth) in enumerate(on_ranks(2, restarted, kind, tmp_path, budget)):
        for one in (first, second, third, fourth):
            assert one["same"]
        assert first["profiled"] == third["profiled"] > 0
        assert second["profiled"] == fourth["profiled"] == 0
        assert max(second["over"]) <= 1 << 14, second["over"]  # a late buffer of Gloo's
        assert not first["said"] and not second["said"] and not fourth["said"]
        (text,) = third["said"]
        assert ("incomplete" if rank else "another rank") in text


def sharing(folder: Path) -> list[tuple[int, bool, int]]:
    """Of three runs of ranks that share layers and a plan, the last one for another budget: how many steps
    were profiled, their bits, and what they took above the budget.
    """
    from lowtide.models import preset
    from lowtide.models.gpt import GPT

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(preset("gpt-nano", vocabulary=64, fused_attention=False), dist.group.WORLD)

    def step(model: nn.Module, seed: int) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        model(tokens, tokens).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    logging.getLogger("lowtide").setLevel(logging.INFO)
    tokens = torch.randint(64, (16, 32), generator=seeded(1))
    rows = []
    for budget in ("70%", "70%", "80%"):
        log = Log()
        logging.getLogger("lowtide").addHandler(log)
        twin, model = make(), make()
        handle = lowtide.limit_memory(model, budget, plans=folder)
        same, over = True, 0
        for seed in range(3):
            same &= all(map(torch.equal, step(twin, seed), step(model, seed)))
            over = (handle.measured_peak_bytes or 0) - (handle.budget_bytes or 0)
        handle.remove()
        rows.append((sum("profiled" in line for line in log.lines), same, over))
        logging.getLogger("lowtide").removeHandler(log)
    return rows


def test_ranks_that_share_a_plan_go_on_with_it(tmp_path: Path) -> None:
    for rows in on_ranks(2, sharing, tmp_path):
        assert [row[:2] for row in rows] == [(1, True), (0, True), (1, True)]
        assert max(row[2] for row in rows) <= 1 << 14, rows  # a late buffer of Gloo's


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(small(dropout=0.0).layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def pipelined(folder: Path) -> list[tuple[int, bool, int]]:
    """Of two runs: how many steps were profiled, their bits, and what they took above the budget."""
    logging.getLogger("lowtide").setLevel(logging.INFO)
    rows = []
    expected: list[torch.Tensor] = []
    for limits in (False, True, True):
        log = Log()
        logging.getLogger("lowtide").addHandler(log)
        module, rank = Stage(), dist.get_rank()
        stage = pipelining.PipelineStage(module, rank, 2, torch.get_default_device())
        schedule = pipelining.Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        x = torch.randn(256, 16, generator=seeded(0))
        handle = lowtide.limit_memory(schedule, "min", plans=folder) if limits else None
        over, found = 0, []
        for _ in range(3):
            module.zero_grad()
            schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank else {}))
            found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
            if handle is not None:
                over = (handle.measured_peak_bytes or 0) - (handle.budget_bytes or 0)
        expected = expected or found
        if handle is not None:
            profiled = sum("profiled" in line for line in log.lines)
            rows.append((profiled, all(map(torch.equal, expected, found)), over))
        logging.getLogger("lowtide").removeHandler(log)
    return rows


def test_a_pipeline_follows_its_plan_from_its_first_step_on(tmp_path: Path) -> None:
    for first, second in on_ranks(2, pipelined, tmp_path):
        assert first[:2] == (1, True) and second[:2] == (0, True)
        assert second[2] <= 0
