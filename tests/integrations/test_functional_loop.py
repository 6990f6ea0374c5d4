"""A loop of one's own in the style of torchtitan: functions that change the model one after another, where
lowtide stands in place of activation checkpointing and of the compiler: the same bits, less memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide import meter
from lowtide.models import build_model
from lowtide.models.presets import ModelConfig

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs Gloo"),
    pytest.mark.skipif(not meter.available(), reason="needs the counting allocator"),
]
LAYERS = 2


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One rank."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def limited(blocks: nn.ModuleList) -> None:
    """In place of ``apply_ac``."""
    for block in blocks:
        lowtide.limit_memory(block, policy="full")


def compiled(blocks: nn.ModuleList) -> None:
    """In place of ``apply_ac`` and ``apply_compile``."""
    for name, block in list(blocks.named_children()):
        blocks.register_module(name, lowtide.compile(block, "min", backend="aot_eager"))


def built(mesh: Any, apply: Callable[[Any], None] | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """A sharded model in which products are in ``dtype``, and its optimizer."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    shape: dict[str, Any] = dict(layers=LAYERS, width=64, heads=4, hidden_width=256, key_value_heads=4)
    model = build_model(ModelConfig("gpt", **shape, vocabulary=256, positions=64))
    if apply is not None:
        apply(model.blocks)
    precision = MixedPrecisionPolicy(param_dtype=dtype)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    mesh: Any,
    apply: Callable[[Any], None] | None,
    dtype: torch.dtype = torch.float32,
    accumulate: int = 1,
    folder: Path | None = None,
) -> tuple[list[torch.Tensor], int]:
    """Losses, evaluations and weights of a few steps, and the peak of the last forward and backward above
    what was resident. With a ``folder`` the second step is that of another model, which goes on from a
    checkpoint.
    """
    model, optimizer = built(mesh, apply, dtype)
    found: list[torch.Tensor] = []
    for step in range(3):
        for part in range(accumulate):
            drawn = torch.Generator().manual_seed(accumulate * step + part)
            tokens = torch.randint(256, (8, 64), generator=drawn)

            def run(model: Any = model, tokens: torch.Tensor = tokens) -> torch.Tensor:
                loss = model(tokens, tokens).loss / accumulate
                loss.backward()
                return loss.detach()

            measured = lowtide.measure(run)
            found.append(measured.value)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(tokens, tokens).loss)
        if folder is not None and step == 0:
            saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(saved, checkpoint_id=folder)
            model, optimizer = built(mesh, apply, dtype)
            kept = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(kept, checkpoint_id=folder)
            model.load_state_dict(kept["model"])
            set_optimizer_state_dict(model, optimizer, kept["optimizer"])
    found += [weight.to_local().detach() for weight in model.state_dict().values()]
    return found, measured.peak_bytes


@pytest.mark.parametrize("apply", [limited, pytest.param(compiled, marks=pytest.mark.slow)])
def test_lowtide_stands_in_place_of_apply_ac(mesh: Any, apply: Any) -> None:
    plain, most = train(mesh, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        # "min" of a compiled block knows nothing of the other blocks' compiling and gathering, and says so
        warnings.filterwarnings("ignore", "a planned step took", lowtide.LowtideWarning)
        found, peak = train(mesh, apply)
    assert all(map(torch.equal, plain, found))
    kept = 8 * 64 * 64 * 4  # bytes of what enters a block
    assert peak < most - 8 * kept, "of the GELU alone autograd would keep eight times as much in a block"


def test_a_loop_that_accumulates_in_bfloat16_and_is_resumed(mesh: Any, tmp_path: Path) -> None:
    plain, most = train(mesh, None, torch.bfloat16, accumulate=2)
    found, peak = train(mesh, limited, torch.bfloat16, accumulate=2, folder=tmp_path / "saved")
    assert all(map(torch.equal, plain, found))
    assert peak < most
