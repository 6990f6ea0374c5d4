"""Checkpoints of FSDP2 outside a tensor-parallel group: saved at 2 x 2, loaded at other layouts, with the
optimizer's state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # once, before processes are made
from ranks import on_each_backend, on_ranks
from shared_models import make, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lowtide import parallel as lp

pytestmark = on_each_backend


def model_of(dp: int, tp: int, seed: int) -> nn.Module:
    """q, k and v are three blocks, the vocabulary is padded, key-value heads are shared by ranks."""
    torch.manual_seed(seed)
    if dp * tp == 1:
        return make("llama", None, False, hidden_width=92, tied=False, key_value_heads=2)
    mesh = init_device_mesh(torch.get_default_device().type, (dp, tp), mesh_dim_names=("dp", "tp"))
    model = make(
        "llama", mesh["tp"] if tp > 1 else None, tp > 1, hidden_width=92, tied=False, key_value_heads=2
    )
    if dp > 1:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        lp.mark_partial_gradients(model)
    return model


def save(folder: str, dp: int, tp: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a little, save, and train on: the losses that follow, and what was saved."""
    model = model_of(dp, tp, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(2):
        step(model, optimizer)
    lp.save_checkpoint(folder, model, optimizer)
    whole = lp.whole_state_dict(model)
    return [step(model, optimizer) for _ in range(2)], whole


def load(folder: str, dp: int, tp: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = model_of(dp, tp, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    lp.load_checkpoint(folder, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    whole = lp.whole_state_dict(model)
    return [step(model, optimizer) for _ in range(2)], whole


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory, group_backend: str) -> tuple[Path, Any]:
    """A folder of what two by two ranks saved, and what the first of them says of it."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, on_ranks(4, save, str(folder), 2, 2)[0]


@pytest.mark.parametrize("layout", [(4, 1), (1, 4), (1, 1)])
def test_saved_at_two_by_two_and_loaded_at(two_by_two: tuple[Path, Any], layout: tuple[int, int]) -> None:
    folder, (expected, saved) = two_by_two
    for losses, found in on_ranks(layout[0] * layout[1], load, str(folder), *layout):
        assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
        assert losses == pytest.approx(expected, abs=2e-6)


def loads_whole() -> bool:
    """A whole state dict goes into a sharded model and comes out the same."""
    alone: Any = model_of(1, 1, 5)
    whole = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
    model = model_of(2, 2, 6)
    lp.load_whole_state_dict(model, whole)
    found = lp.whole_state_dict(model)
    dist.barrier()
    return all(torch.equal(found[name], whole[name]) for name in whole)


def test_whole_state_dicts_pass_through() -> None:
    assert all(on_ranks(4, loads_whole))
