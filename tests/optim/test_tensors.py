"""FSDP2's sharded parameters on Gloo, with 2 and 4 processes, and checkpoints that are resharded from 4 to
2.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # once, not in each process: with all of FSDP it takes seconds
from benchmarks.throttled_link import ThrottledLink
from ranks import on_each_backend, on_ranks, seeded
from runs import ADAMW
from torch import nn

from lowtide.optim import HostOptimizer, OptimError

pytestmark = on_each_backend


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 70), nn.Linear(70, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def make(size: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    # 3 rows: some processes of 4 hold none
    net = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(24, 3)).to(dtype)
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    for block in net[:3]:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: range,
    clip: str | None = None,
    micro: int = 1,
) -> list[float]:
    norms = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(micro):
            x = torch.randn(4, 24, generator=seeded(1000 * rank + 10 * step + part))
            net(x.to(next(net.parameters()).dtype)).square().mean().backward()
        if clip == "torch":
            total: Any = nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            norms.append(total.full_tensor().item())
        elif clip == "own":
            assert isinstance(optimizer, HostOptimizer)
            norms.append(optimizer.clip_grad_norm_(0.3).item())
        optimizer.step()
    return norms


def locals_of(net: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().detach().clone() for p in net.parameters()]  # type: ignore[attr-defined]


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(locals_of(a), locals_of(b), strict=True))


def every_fraction(rank: int, size: int, folder: Path) -> None:
    plain_model = make(size)
    norms = train(
        plain_model,
        torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW),
        rank,
        range(3),
        clip="torch",
        micro=2,
    )
    for tenth in (3, 10) if size == 2 else (3,):
        ours_model = make(size)
        ours = HostOptimizer(torch.optim.AdamW, ours_model.parameters(), host_fraction=tenth / 10, **ADAMW)
        assert train(ours_model, ours, rank, range(3), clip="torch", micro=2) == norms
        assert equal(plain_model, ours_model), tenth
    for fraction in (0.4, 1.0) if size == 2 else (0.4,):
        for link in (None, ThrottledLink()):
            ours_model = make(size)
            ours = HostOptimizer(
                torch.optim.AdamW,
                ours_model.parameters(),
                host_fraction=fraction,
                stream_gradients=True,
                link=link,
                **ADAMW,
            )
            found = train(ours_model, ours, rank, range(3), clip="own", micro=2)
            assert all(abs(a - b) <= 1e-6 * b for a, b in zip(found, norms, strict=True)), (found, norms)
            if fraction:
                with pytest.raises(OptimError, match="clip_grad_norm_"):
                    nn.utils.clip_grad_norm_(ours_model.parameters(), 1.0)
            for mine, theirs in zip(locals_of(ours_model), locals_of(plain_model), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def streamed(rank: int, size: int, folder: Path) -> None:
    """Without clipping streamed runs are bitwise the same, late ones too once finished."""
    plain_model = make(size)
    train(
        plain_model, torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW), rank, range(3), micro=2
    )
    late: dict[str, Any] = {"delayed": True, "delay_after": 3}
    for options, fractions in (({}, (0.3, 1.0)), ({"link": ThrottledLink()}, (0.3,)), (late, (0.3,))):
        for fraction in fractions:
            ours_model = make(size)
            more: dict[str, Any] = {**options, **ADAMW}
            ours = HostOptimizer(
                torch.optim.AdamW,
                ours_model.parameters(),
                host_fraction=fraction,
                stream_gradients=True,
                **more,
            )
            train(ours_model, ours, rank, range(3), micro=2)
            assert equal(plain_model, ours_model), (options, fraction)
    ours_model = make(size)
    ours = HostOptimizer(
        torch.optim.AdamW, ours_model.parameters(), stream_gradients=True, overlap_update=True, **ADAMW
    )
    train(ours_model, ours, rank, range(3))
    plain_model = make(size)
    train(plain_model, torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW), rank, range(3))
    assert equal(plain_model, ours_model)
    clipped = [make(size) for _ in range(2)]
    for net, more in zip(clipped, ({}, {"overlap_update": True, "reversible": True}), strict=True):
        ours = HostOptimizer(torch.optim.AdamW, net.parameters(), stream_gradients=True, **more, **ADAMW)
        train(net, ours, rank, range(3), clip="own")
    assert equal(*clipped)
    train(clipped[1], ours, rank, range(3, 4), clip="own")
    ours.rollback()
    assert equal(*clipped)


def masters(rank: int, size: int, folder: Path) -> None:
    """16-bit shards: the same at every fraction and link."""
    expected = None
    for fraction in (0.0, 0.5, 1.0):
        for link in (None, ThrottledLink()):
            net = make(size, torch.bfloat16)
            ours = HostOptimizer(
                torch.optim.AdamW,
                net.parameters(),
                host_fraction=fraction,
                link=link,
                stream_gradients=True,
                **ADAMW,
            )
            train(net, ours, rank, range(3))
            found = locals_of(net)
            expected = expected or found
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), fraction


def replicated(rank: int, size: int, folder: Path) -> None:
    """DistributedDataParallel: bitwise without streaming, an error with it."""
    from torch.nn.parallel import DistributedDataParallel

    def wrapped() -> nn.Module:
        torch.manual_seed(0)
        return DistributedDataParallel(nn.Sequential(Block(), nn.Linear(24, 3)))

    plain, ours, streaming = wrapped(), wrapped(), wrapped()
    train(plain, torch.optim.AdamW(plain.parameters(), fused=True, **ADAMW), rank, range(3))
    train(
        ours, HostOptimizer(torch.optim.AdamW, ours.parameters(), host_fraction=0.5, **ADAMW), rank, range(3)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    optimizer = HostOptimizer(torch.optim.AdamW, streaming.parameters(), stream_gradients=True, **ADAMW)
    with pytest.raises(OptimError, match="DistributedDataParallel"):
        train(streaming, optimizer, rank, range(1))


def optimizers(net: nn.Module, fraction: float) -> dict[str, torch.optim.Optimizer]:
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 1e-3},
    ]
    return {
        "plain": torch.optim.AdamW(groups, fused=True, **ADAMW),
        "ours": HostOptimizer(
            torch.optim.AdamW, groups, host_fraction=fraction, stream_gradients=fraction == 1, **ADAMW
        ),
    }


def save(rank: int, size: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    for dtype in (torch.float32, torch.bfloat16):
        for name in ("plain", "ours"):
            net = make(size, dtype)
            optimizer = optimizers(net, 0.6)[name]
            train(net, optimizer, rank, range(3))
            model_state, optimizer_state = get_state_dict(net, optimizer)
            dcp.save(
                {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / f"{name}-{dtype}"
            )


def load(rank: int, size: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def resumed(saved_by: str, loaded_by: str, dtype: torch.dtype, fraction: float) -> nn.Module:
        net = make(size, dtype)
        optimizer = optimizers(net, fraction)[loaded_by]
        model_state, optimizer_state = get_state_dict(net, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder / f"{saved_by}-{dtype}")
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(net, optimizer, rank, range(3, 6))
        return net

    expected = resumed("plain", "plain", torch.float32, 0)
    for fraction in (0.3, 1.0):
        assert equal(expected, resumed("ours", "ours", torch.float32, fraction)), fraction
    assert equal(expected, resumed("plain", "ours", torch.float32, 0.5))
    assert equal(expected, resumed("ours", "plain", torch.float32, 0))
    kept = resumed("ours", "ours", torch.bfloat16, 0.0)
    assert equal(kept, resumed("ours", "ours", torch.bfloat16, 1.0))  # masters were resharded, too


def in_turn(bodies: list[Callable[[int, int, Path], None]], folder: Path) -> None:
    for body in bodies:
        body(dist.get_rank(), dist.get_world_size(), folder)
        dist.barrier()


def test_sharded_parameters_and_resharded_checkpoints(tmp_path: Path) -> None:
    on_ranks(4, in_turn, [every_fraction, save], tmp_path)
    on_ranks(2, in_turn, [every_fraction, streamed, masters, load, replicated], tmp_path)
