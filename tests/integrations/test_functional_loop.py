"""A loop of one's own in the style of torchtitan: functions that change the model one after another, where
lowtide stands in place of activation checkpointing and of the compiler: the same bits, less memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
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


def train(mesh: Any, apply: Callable[[Any], None] | None) -> tuple[list[torch.Tensor], int]:
    """Losses and weights of a few steps, and the peak of the last one above what stood."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    shape: dict[str, Any] = dict(layers=LAYERS, width=64, heads=4, hidden_width=256, key_value_heads=4)
    model = build_model(ModelConfig("gpt", **shape, vocabulary=256, positions=64))
    if apply is not None:
        apply(model.blocks)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: list[torch.Tensor] = []
    for step in range(3):
        tokens = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(step))

        def run(tokens: torch.Tensor = tokens) -> torch.Tensor:
            loss = model(tokens, tokens).loss
            loss.backward()
            return loss.detach()

        measured = lowtide.measure(run)
        found.append(measured.value)
        optimizer.step()
        optimizer.zero_grad()
    found += [parameter.to_local().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return found, measured.peak_bytes


@pytest.mark.parametrize("apply", [limited, compiled])
def test_lowtide_stands_in_place_of_apply_ac(mesh: Any, apply: Any) -> None:
    plain, most = train(mesh, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        found, peak = train(mesh, apply)
    assert all(map(torch.equal, plain, found))
    kept = 8 * 64 * 64 * 4  # bytes of what enters a block
    assert peak < most - 8 * kept, "of the GELU alone autograd would keep eight times as much in a block"
