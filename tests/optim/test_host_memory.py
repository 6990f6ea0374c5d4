"""Measures 4 and 5: bytes over the link, counted; memory of the device, measured; buffers that do not
grow.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from benchmarks.throttled_link import ThrottledLink
from torch import nn

from lowtide import meter
from lowtide.optim import HostOptimizer

WIDTH = 256


def chain(layers: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(dtype)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> None:
    net(torch.ones(4, WIDTH, dtype=dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_bytes_down_and_two_up(dtype: torch.dtype, delayed: bool, stream: bool) -> None:
    """arXiv 2101.06840, section 4: 2M bytes of gradients down and 2M of parameters up for M parameters in 16
    bits; 4M a step.
    """
    net = chain(6, dtype)
    count = sum(p.numel() for p in net.parameters())
    for fraction in (0.0, 0.25, 1.0):
        link = ThrottledLink()
        optimizer = HostOptimizer(
            torch.optim.AdamW,
            net.parameters(),
            host_fraction=fraction,
            stream_gradients=stream,
            delayed=delayed,
            delay_after=1,
            link=link,
        )
        for _ in range(3):
            # the first also brings the masters down, the second begins a delayed update
            step(net, optimizer, dtype)
        before = link.bytes_down, link.bytes_up
        step(net, optimizer, dtype)
        optimizer.state_dict()  # waits for what runs beside
        moved = link.bytes_down - before[0], link.bytes_up - before[1]
        share = round(count * fraction) * dtype.itemsize
        assert moved == (share, share)
        optimizer.close()


def test_accumulation_sends_each_gradient_once() -> None:
    net = chain(3, torch.bfloat16)
    count = sum(p.numel() for p in net.parameters())
    link = ThrottledLink()
    optimizer = HostOptimizer(torch.optim.AdamW, net.parameters(), stream_gradients=True, link=link)
    step(net, optimizer, torch.bfloat16)
    before = link.bytes_down
    for _ in range(3):
        net(torch.ones(4, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    assert link.bytes_down - before == 3 * 2 * count


def resident(net: nn.Module, optimizer_of: Any) -> tuple[int, int]:
    """Measured live bytes of main memory after backward and step: (gradients and state after backward,
    buffers on the host tier).
    """
    gc.collect()  # what other tests left is not to be freed meanwhile
    with meter.peak() as watch:
        optimizer = optimizer_of()
        for _ in range(2):
            step(net, optimizer)
        net(torch.ones(4, WIDTH)).square().mean().backward()
        gc.collect()
        found = watch.live_bytes
        buffers = optimizer._updater.buffer_bytes if isinstance(optimizer, HostOptimizer) else 0
        net.zero_grad()
        optimizer.zero_grad()
    del optimizer
    gc.collect()
    return found, buffers


@pytest.mark.skipif(not meter.available(), reason="needs the counting allocator")
def test_memory_falls_to_the_stated_share() -> None:
    """The device is main memory and the host tier is disk: state (8 bytes a parameter) and streamed gradients
    (4) go.
    """
    net = chain(10)
    count = sum(p.numel() for p in net.parameters())
    plain, _ = resident(net, lambda: torch.optim.AdamW(net.parameters(), fused=True))
    assert abs(plain - 12 * count) < 20_000
    for fraction in (0.0, 0.3, 0.5, 0.8, 1.0):

        def make(fraction: float = fraction) -> HostOptimizer:
            return HostOptimizer(
                torch.optim.AdamW,
                net.parameters(),
                host_fraction=fraction,
                stream_gradients=True,
                chunk_bytes=1 << 16,
            )

        ours, buffers = resident(net, make)
        # the stretch of the one split parameter is cut out of its gradient
        split_gradient = WIDTH * WIDTH * 4
        assert abs(ours - buffers - (1 - fraction) * plain) < split_gradient * 0.02 + 20_000, fraction


@pytest.mark.skipif(not meter.available(), reason="needs the counting allocator")
def test_the_peak_of_a_step_falls_too() -> None:
    """Gradients leave while backward runs, so they are never all there at once."""

    def peak(optimizer: torch.optim.Optimizer, net: nn.Module) -> int:
        step(net, optimizer)
        with meter.peak() as watch:
            step(net, optimizer)
        return watch.peak_bytes

    net = chain(16)
    count = sum(p.numel() for p in net.parameters())
    kept = peak(HostOptimizer(torch.optim.AdamW, net.parameters(), chunk_bytes=1 << 16), net)
    streamed = peak(
        HostOptimizer(torch.optim.AdamW, net.parameters(), stream_gradients=True, chunk_bytes=1 << 16), net
    )
    assert kept > 4 * count
    assert streamed < 4 * count / 4


@pytest.mark.parametrize("stream", [False, True])
def test_buffers_do_not_grow_with_the_model(stream: bool) -> None:
    sizes = set()
    for layers in (8, 32):
        net = chain(layers, torch.bfloat16)
        optimizer = HostOptimizer(
            torch.optim.AdamW,
            net.parameters(),
            host_fraction=0.5,
            stream_gradients=stream,
            link=ThrottledLink(),
            chunk_bytes=1 << 16,
        )
        for _ in range(2):
            step(net, optimizer, torch.bfloat16)
        sizes.add(optimizer._updater.buffer_bytes)
        optimizer.close()
    assert len(sizes) == 1
    assert sizes.pop() <= 16 * (1 << 16)


def test_gradients_in_flight_are_bounded() -> None:
    """A slow link holds backward back rather than letting gradients pile up."""
    net = chain(24)
    link = ThrottledLink(down_bytes_per_second=40e6)
    optimizer = HostOptimizer(
        torch.optim.AdamW, net.parameters(), stream_gradients=True, link=link, chunk_bytes=1 << 16
    )
    optimizer._place()
    most = 0
    original = link.down

    def down(host: torch.Tensor, device: torch.Tensor) -> Any:
        nonlocal most
        most = max(most, sum(size for _, size in optimizer._stream._flying))
        return original(host, device)

    link.down = down  # type: ignore[method-assign]
    net(torch.ones(4, WIDTH)).square().mean().backward()
    assert 0 < most <= max(4 * (1 << 16), 2 * max(p.nbytes for p in net.parameters()))
    optimizer.step()
    optimizer.close()


def test_one_large_gradient_does_not_hold_backward_back() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8 * WIDTH))
    link, opened = ThrottledLink(), threading.Event()
    optimizer = HostOptimizer(
        torch.optim.AdamW, net.parameters(), stream_gradients=True, link=link, chunk_bytes=1 << 14
    )
    optimizer._place()
    loss = net(torch.ones(4, WIDTH)).square().mean()
    link._lanes["down"].do(opened.wait)  # nothing arrives on the host before it is opened
    late = threading.Timer(60, opened.set)
    late.start()
    loss.backward()
    assert not opened.is_set(), "backward waited for what goes to the host"
    late.cancel()
    opened.set()
    optimizer.step()
    assert link.bytes_down >= sum(p.nbytes for p in net.parameters())
    optimizer.close()
