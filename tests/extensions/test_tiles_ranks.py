"""``limit_memory(tiles="auto")`` on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks
from small_model import needs_meter
from test_tiles_chosen import TOKENS, model, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import parallel as lp
from lowtide.extensions.tiles.tile import tiled_forward
from lowtide.models.gpt import GPT
from lowtide.models.presets import preset

pytestmark = [on_each_backend, needs_meter]


def replica() -> Any:
    """A rank of DDP, whose sequences are shorter or longer than the other's."""
    length = TOKENS if dist.get_rank() else TOKENS // 4
    found = []
    for budget in (None, 4 << 20):
        net = DistributedDataParallel(model())
        handle = lowtide.limit_memory(net, budget, tiles="auto", progress=False) if budget else None
        for _ in range(2):
            net.zero_grad()
            net(tokens(length)).square().mean().backward()
        if handle is not None:
            assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= (budget or 0)
        found.append([p.grad for p in net.parameters()])
    pieces = [one.tiling.pieces for m in net.modules() if (one := tiled_forward(m)) is not None]
    return pieces, *found


def test_replicas_choose_each_for_itself() -> None:
    (few, *_), (many, plain, tiled) = on_ranks(2, replica)
    assert few == [] and len(many) == 2
    for one, other in zip(plain, tiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def sequences() -> Any:
    """A rank of two that share every sequence, one of which has less memory."""
    net: nn.Module = lowtide_model()
    words = torch.randint(256, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    plain = net(words, words).loss
    net = lp.context_parallel(net, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"])
    budget = (4 << 20) - (dist.get_rank() << 20)
    handle = lowtide.limit_memory(net, budget, tiles="auto", progress=False)
    for _ in range(2):
        net.zero_grad()
        loss = net(words, words).loss
        loss.backward()
        torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0.0)
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
    return {name: one.tiling.pieces for name, m in net.named_modules() if (one := tiled_forward(m))}


def lowtide_model() -> nn.Module:
    from lowtide.models import build_model
    from lowtide.models.presets import ModelConfig

    torch.manual_seed(0)
    heads: dict[str, Any] = dict(heads=2, key_value_heads=2, hidden_width=256)
    return build_model(
        ModelConfig(family="llama", vocabulary=256, positions=TOKENS, layers=2, width=32, **heads)
    )


def test_ranks_that_share_sequences_run_in_as_many_pieces() -> None:
    one, other = on_ranks(2, sequences)
    assert one == other and one


def layers(sequence_parallel: bool) -> Any:
    """A rank of two that share the layers, and sequences between them where that is asked for."""
    changes: dict[str, Any] = {"vocabulary": 4096, "layers": 2, "positions": TOKENS}
    torch.manual_seed(0)
    net = GPT(preset("gpt-nano", **changes), dist.group.WORLD, sequence_parallel)
    words = torch.randint(4096, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    found = []
    for budget in (None, "min"):
        handle = lowtide.limit_memory(net, budget, tiles="auto", progress=False) if budget else None
        for _ in range(2):
            net.zero_grad()
            loss = net(words, words).loss
            loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
    assert handle is not None and handle.plan is not None
    assert handle.measured_peak_bytes is not None and handle.plan.budget_bytes is not None
    above = handle.measured_peak_bytes - handle.plan.budget_bytes
    return above, handle.plan.notes, str(handle.plan.program), *found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_that_share_layers_hold_one_plan_with_tiles(sequence_parallel: bool) -> None:
    (_, notes, program, plain, tiled), (_, _, other_program, *_) = results = on_ranks(
        2, layers, sequence_parallel
    )
    assert any("the loss in" in note for note in notes) and program == other_program
    assert max(above for above, *_ in results) <= 0
    for one, other in zip(plain, tiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
