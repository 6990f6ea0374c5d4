"""Checkpoints that change hands: saved at one number of ranks, loaded at another, with the optimizer's state;
training goes on as if.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # once, before processes are made
from ranks import needs_gloo, on_ranks
from shared_models import make, step, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lowtide import parallel as lp
from lowtide.models.stage import cut, stage_input
from lowtide.parallel.pipeline import Pipeline

pytestmark = needs_gloo
SIZES = (1, 2, 4)
FAMILIES: list[tuple[str, dict[str, Any]]] = [("gpt", {}), ("llama", {"tied": False, "key_value_heads": 2})]


def model_of(index: int, seed: int) -> nn.Module:
    """Vocabulary and MLP do not divide by four, q, k and v are three blocks, and four ranks share two
    key-value heads.
    """
    family, changes = FAMILIES[index]
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    model = make(family, group, group is not None, hidden_width=90, **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        whole = {
            name: torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.05
            for name, tensor in whole_of(model).items()
        }
        if "head.weight" in whole and "tied" not in changes:
            whole["head.weight"] = whole["tokens.weight"]
        lp.load_whole_state_dict(model, whole)
    return model


def whole_of(model: nn.Module) -> dict[str, Tensor]:
    return lp.whole_state_dict(model)


def save(folder: str) -> list[list[float]]:
    """Train a little, save, and train on: the losses that follow."""
    found = []
    for index in range(len(FAMILIES)):
        model = model_of(index, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(2):
            step(model, optimizer)
        lp.save_checkpoint(f"{folder}/{index}", model, optimizer)
        found.append([step(model, optimizer) for _ in range(2)])
    return found


def load(folders: list[str]) -> list[list[float]]:
    """The losses that follow each checkpoint."""
    found = []
    for folder, index in itertools.product(folders, range(len(FAMILIES))):
        model = model_of(index, 2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        lp.load_checkpoint(f"{folder}/{index}", model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        found.append([step(model, optimizer) for _ in range(2)])
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """A folder of what 1, 2 and 4 ranks saved, and the losses that follow on one."""
    folder = tmp_path_factory.mktemp("saved")
    found = {size: on_ranks(size, save, str(folder / str(size))) for size in SIZES}
    return folder, found[1][0]


@pytest.mark.parametrize("there", SIZES)
def test_saved_at_one_size_and_loaded_at_another(saved: tuple[Path, list[list[float]]], there: int) -> None:
    folder, expected = saved
    others = [size for size in SIZES if size != there]
    for rank in on_ranks(there, load, [str(folder / str(size)) for size in others]):
        cases = itertools.product(others, expected)
        for found, (size, wanted) in zip(rank, cases, strict=True):
            assert found == pytest.approx(wanted, abs=2e-6), f"saved at {size}, loaded at {there}"


def load_in_stages(folder: str) -> list[float]:
    """Two stages of two tensor-parallel ranks each go on from what other layouts saved."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    family, changes = FAMILIES[1]
    model = make(family, mesh["tp"], True, hidden_width=90, **changes)
    (stage,) = cut(model, 2, [mesh["pp"].get_local_rank()])
    micro_batches, length = tokens().shape
    pipeline = Pipeline(
        [stage],
        "1f1b",
        micro_batches,
        stage_input(model, 1, length, torch.float64),
        mesh["pp"].get_group(),
        "cpu",
    )
    optimizer = torch.optim.AdamW(stage.model.parameters(), 1e-3)
    lp.load_checkpoint(f"{folder}/1", stage.model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-2 and len(optimizer.state) == len(
        list(stage.model.parameters())
    )
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.tensor(pipeline.step(tokens(), tokens().roll(-1, 1)), dtype=torch.float64)
        lp.allreduce_sequence_parallel_gradients(optimizer)
        optimizer.step()
        dist.all_reduce(loss, group=mesh["pp"].get_group())
        losses.append(loss.item())
    return losses


def test_saved_at_one_size_and_loaded_in_stages(saved: tuple[Path, list[list[float]]]) -> None:
    """Saved at t=4 and p=1, loaded at t=2 and p=2."""
    folder, expected = saved
    for losses in on_ranks(4, load_in_stages, str(folder / "4")):
        assert losses == pytest.approx(expected[1], abs=2e-6)


def refused() -> bool:
    layer = lp.ColumnParallelLinear(4, 6, gather_output=False)
    shared = lp.sharded_state_dict(layer)["model"]["weight"]
    assert shared.shape == (6, 4) and shared.local.shape == (3, 4)
    with pytest.raises(lp.ParallelError, match=r"use \.local"):
        shared + 1
    with pytest.raises(lp.ParallelError, match=r"missing \['bias'\]"):
        lp.load_whole_state_dict(layer, {"weight": torch.zeros(6, 4)})
    with pytest.raises(lp.ParallelError, match=r"\(5, 4\)"):
        lp.load_whole_state_dict(layer, {"weight": torch.zeros(5, 4), "bias": torch.zeros(6)})
    return True


def test_what_does_not_fit() -> None:
    assert all(on_ranks(2, refused))
