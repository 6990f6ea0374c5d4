"""The host optimizer over streams, on a stand-in that copies as late as it may: bits, waits and memory."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import lazy_streams
import pytest
import torch
from lazy_streams import LazyStreams
from torch import nn

from lowtide.optim import CudaLink, HostOptimizer, pool
from lowtide.optim.clip import clip_

WIDTH = 64


def net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 8 * WIDTH)).to(dtype)


def unpinned(count: int, pin: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def backward(model: nn.Module, step: int, dtype: torch.dtype) -> None:
    for micro in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
        model(x.to(dtype)).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("options", [{}, {"stream_gradients": True}, {"delayed": True, "delay_after": 1}])
def test_every_copy_is_waited_for(options: dict[str, bool], fraction: float, dtype: torch.dtype) -> None:
    """The same bits as on a link that copies at once."""
    found = []
    for streams in (None, LazyStreams(eager=True)):
        model = net(dtype)
        with patch.object(pool, "host_bytes", unpinned):
            link = CudaLink(torch.device("cpu"), streams) if streams is not None else None
            optimizer = HostOptimizer(
                torch.optim.AdamW,
                model.parameters(),
                host_fraction=fraction,
                host="memory",
                link=link,
                chunk_bytes=1 << 13,
                lr=0.01,
                **options,  # type: ignore[arg-type]
            )
            for step in range(4):
                optimizer.zero_grad()
                backward(model, step, dtype)
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
            if optimizer.delayed:
                optimizer.finish()
            optimizer.close()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_backward_never_waits_for_the_link() -> None:
    """Not even for a gradient that is larger than all the chunks that may be under way."""
    streams, model = LazyStreams(eager=True), net(torch.float32)
    with patch.object(pool, "host_bytes", unpinned):
        optimizer = HostOptimizer(
            torch.optim.AdamW,
            model.parameters(),
            stream_gradients=True,
            link=CudaLink(torch.device("cpu"), streams),
            chunk_bytes=1 << 12,
        )
        optimizer._place()
        before = streams.waits
        model(torch.ones(4, WIDTH)).square().mean().backward()
        assert streams.waits == before
        optimizer.step()
        assert streams.waits > before
        optimizer.close()


def test_nor_does_the_second_micro_batch() -> None:
    """Its gradients are added on the host, through few buffers. While no copy ends, backward goes on."""
    streams, model = LazyStreams(eager=True), net(torch.float32)
    open_again, synchronize = threading.Event(), lazy_streams.Event.synchronize

    def late(event: Any) -> None:
        assert open_again.wait(20)
        synchronize(event)

    with patch.object(pool, "host_bytes", unpinned):
        optimizer = HostOptimizer(
            torch.optim.SGD,
            model.parameters(),
            lr=0.1,
            stream_gradients=True,
            link=CudaLink(torch.device("cpu"), streams),
            chunk_bytes=1 << 20,
        )
        with patch.object(lazy_streams.Event, "synchronize", late), optimizer.accumulating():
            model(torch.ones(4, WIDTH)).square().mean().backward()
            again = threading.Thread(target=lambda: model(torch.ones(4, WIDTH)).square().mean().backward())
            again.start()
            again.join(5)
            blocked = again.is_alive()
            open_again.set()
            again.join()
            optimizer.step()
        optimizer.close()
    assert not blocked
    plain = net(torch.float32)
    for _ in range(2):
        plain(torch.ones(4, WIDTH)).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_clipping_moves_its_factor_once_whatever_the_count() -> None:
    """Each `.to` of a number that another device has makes the program wait for that device."""

    class Counting(torch.Tensor):
        moves = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.moves += func is torch.Tensor.to
            return super().__torch_function__(func, types, args, kwargs)

    counts = []
    for parameters in (3, 30):
        given = [torch.randn(4) for _ in range(parameters)]
        pairs = [(given[0], gradient.clone().as_subclass(Counting)) for gradient in given]
        Counting.moves = 0
        total, _ = clip_(pairs, 0.5, 2.0, False)
        counts.append(Counting.moves)
        plain = [torch.nn.Parameter(gradient) for gradient in given]
        for parameter in plain:
            parameter.grad = parameter.detach().clone()
        expected = torch.nn.utils.clip_grad_norm_(plain, 0.5)
        assert torch.equal(total.as_subclass(torch.Tensor), expected)
        for (_, ours), theirs in zip(pairs, plain, strict=True):
            assert theirs.grad is not None
            assert torch.equal(ours.as_subclass(torch.Tensor), theirs.grad)
    assert counts[0] == counts[1] <= 1
