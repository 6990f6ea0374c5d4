"""The host optimizer on CUDA: state in page-locked memory, streams and events."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.optim import HostOptimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
WIDTH = 1024


def net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).to("cuda", dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: int = 4) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro)).to(
                "cuda", dtype
            )
            model(x).square().mean().backward()
        if isinstance(optimizer, HostOptimizer):
            optimizer.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.cuda.synchronize()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_close_to_torch(fraction: float, stream: bool) -> None:
    """Both sides run fused kernels, of CUDA and of the CPU, which round differently."""
    plain_model, ours_model = net(torch.float32), net(torch.float32)
    train(plain_model, torch.optim.AdamW(plain_model.parameters(), fused=True), torch.float32)
    ours = HostOptimizer(
        torch.optim.AdamW,
        ours_model.parameters(),
        host_fraction=fraction,
        stream_gradients=stream,
        chunk_bytes=1 << 20,
    )
    train(ours_model, ours, torch.float32)
    for a, b in zip(plain_model.parameters(), ours_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    ours.close()


def test_bytes_and_device_memory() -> None:
    model = net(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    before = torch.cuda.memory_allocated()
    optimizer = HostOptimizer(
        torch.optim.AdamW, model.parameters(), stream_gradients=True, chunk_bytes=1 << 20
    )
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        optimizer.zero_grad()
        moved = optimizer.link.bytes_down, optimizer.link.bytes_up
        model(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    assert (optimizer.link.bytes_down - moved[0], optimizer.link.bytes_up - moved[1]) == (
        2 * count,
        2 * count,
    )
    assert torch.cuda.memory_allocated() - before < 2 * count / 4
    optimizer.close()


def test_auto_and_delayed() -> None:
    model = net(torch.bfloat16)
    optimizer = HostOptimizer(
        torch.optim.AdamW,
        model.parameters(),
        host_fraction="auto",
        device_budget="20MiB",
        delayed=True,
        delay_after=1,
    )
    train(model, optimizer, torch.bfloat16)
    optimizer.finish()
    assert optimizer.balance is not None
    assert 0 < optimizer.balance.host_fraction <= 1
    assert all(torch.isfinite(p).all() for p in model.parameters())
    optimizer.close()
