"""Checkpoints that change hands: saved at one number of ranks, loaded at another, with the optimizer's state;
training goes on as if.
"""

from __future__ import annotations

import itertools
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # once, before processes are made
from ranks import on_each_backend, on_ranks, seeded
from shared_models import make, step, tokens
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from lowtide import parallel as lp
from lowtide.models.stage import cut, stage_input
from lowtide.parallel.pipeline import Pipeline

pytestmark = on_each_backend
SIZES = (1, 2, 4)
FAMILIES: list[tuple[str, dict[str, Any]]] = [("gpt", {}), ("llama", {"tied": False, "key_value_heads": 2})]


def model_of(index: int, seed: int) -> nn.Module:
    """Vocabulary and MLP do not divide by four, q, k and v are three blocks, and four ranks share two
    key-value heads.
    """
    family, changes = FAMILIES[index]
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    model = make(family, group, group is not None, hidden_width=90, **changes)
    generator = seeded(seed)
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
def saved(tmp_path_factory: pytest.TempPathFactory, group_backend: str) -> tuple[Path, list[list[float]]]:
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
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("pp", "tp"))
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
        torch.get_default_device(),
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


def saved_by_pytorch(folder: str) -> None:
    """PyTorch's own ways to save, by the plain state dicts."""
    model = model_of(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step(model, optimizer)
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/plain")
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=f"{folder}/both")
    apart = dist.new_group(backend="gloo")
    state = lp.sharded_state_dict(model, optimizer)
    dcp.async_save(state, checkpoint_id=f"{folder}/async", process_group=apart).result()
    moments = {name: entries["exp_avg"] for name, entries in states[1]["state"].items()}
    whole = whole_of(model)
    assert {name: tuple(tensor.shape) for name, tensor in moments.items() if name in whole} == {
        name: tuple(whole[name].shape) for name in moments
    }
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/whole")


def loaded_by_pytorch(folder: str) -> list[float]:
    """The losses that follow what PyTorch loads."""
    found = []
    whole = torch.load(f"{folder}/whole")
    for name in ("both", "async"):
        model = model_of(1, 2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(parts, checkpoint_id=f"{folder}/{name}")
        model_part, optimizer_part = parts["model"], parts["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=model_part, optim_state_dict=optimizer_part)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in whole_of(model).items())
        found.append(step(model, optimizer))
    model = model_of(1, 3)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/plain")
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    assert all(torch.equal(tensor, whole[name]) for name, tensor in whole_of(model).items())
    return found


def test_what_pytorch_saves_is_whole(tmp_path: Path) -> None:
    """``DCP.save(model.state_dict())``, ``get_state_dict`` and ``async_save`` at two ranks, loaded at one and
    two.
    """
    on_ranks(2, saved_by_pytorch, str(tmp_path))
    found = [losses for size in (1, 2) for losses in on_ranks(size, loaded_by_pytorch, str(tmp_path))]
    assert all(losses == pytest.approx([found[0][0]] * 2, abs=2e-6) for losses in found)


def refused() -> bool:
    layer = lp.ColumnParallelLinear(4, 6, gather_output=False)
    shared = lp.sharded_state_dict(layer)["model"]["weight"]
    assert shared.shape == (6, 4) and shared.local.shape == (3, 4)
    with pytest.raises(lp.ParallelError, match=r"use \.local"):
        shared + 1
    with pytest.raises(lp.ParallelError, match="would hold SharedTensor"):
        torch.save(layer.state_dict(), BytesIO())
    with pytest.raises(lp.ParallelError, match=r"take lowtide\.parallel\.whole_state_dict"):
        shared.untyped_storage()  # as save_pretrained does
    with pytest.raises(RuntimeError, match="a part of a parameter"):
        nn.Linear(4, 6).load_state_dict(layer.state_dict())
    with pytest.raises(lp.ParallelError, match=r"missing \['bias'\]"):
        lp.load_whole_state_dict(layer, {"weight": torch.zeros(6, 4)})
    with pytest.raises(lp.ParallelError, match=r"\(5, 4\)"):
        lp.load_whole_state_dict(layer, {"weight": torch.zeros(5, 4), "bias": torch.zeros(6)})
    return True


def test_what_does_not_fit() -> None:
    assert all(on_ranks(2, refused))
