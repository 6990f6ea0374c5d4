"""A replay runs under the settings that its operation had: backends' flags, precisions, the default dtype. A
program may set others around its forward alone, or around its backward alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

Setting = Callable[[], AbstractContextManager[Any]]
BACKENDS: Any = torch.backends


@contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def precision(backend: Any, value: str) -> AbstractContextManager[Any]:
    return setting(lambda: backend.fp32_precision, partial(set_precision, backend), value)


def set_precision(backend: Any, value: str) -> None:
    with BACKENDS.__allow_nonbracketed_mutation():  # PyTorch's helpers of tests forbid it to a process
        backend.fp32_precision = value


SETTINGS: dict[str, Setting] = {
    "oneDNN": lambda: BACKENDS.mkldnn.flags(enabled=False),
    "cuDNN": lambda: BACKENDS.cudnn.flags(enabled=False, allow_tf32=False),
    "older name": lambda: setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "precision": lambda: precision(BACKENDS.mkldnn.matmul, "bf16"),
    "all precisions": lambda: precision(BACKENDS, "ieee"),
    "default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
}


def settings_now() -> list[Any]:
    parts = (BACKENDS, BACKENDS.mkldnn, BACKENDS.cudnn)
    parts += BACKENDS.mkldnn.conv, BACKENDS.mkldnn.matmul, BACKENDS.cudnn.conv, BACKENDS.cuda.matmul
    found = [part.fp32_precision for part in parts]
    for older in (torch.get_float32_matmul_precision, lambda: BACKENDS.cudnn.allow_tf32):
        try:
            found.append(older())
        except RuntimeError:  # it is set by newer names
            found.append(None)
    return [*found, BACKENDS.mkldnn.enabled, BACKENDS.cudnn.enabled, torch.get_default_dtype()]


class Net(nn.Module):
    """Convolutions round otherwise without oneDNN; the quotient of integers has the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.last = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution in self.convolutions:
            x = torch.tanh(convolution(x).exp().sin())
        scale = torch.sin(torch.arange(64, device=x.device) / 7)
        return self.last((x.flatten(2) * scale).float().tanh()).square().mean()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("around", ["forward", "backward"])
def test_a_replay_runs_under_the_settings_of_the_forward(twins: Any, name: str, around: str) -> None:
    torch.manual_seed(0)
    both = twins(Net())
    x = torch.randn(4, 8, 8, 8)
    for _ in range(3):
        grads = []
        for model in (both.plain, both.limited):
            model.zero_grad()
            with SETTINGS[name]() if around == "forward" else nullcontext():
                loss = model(x)
            with SETTINGS[name]() if around == "backward" else nullcontext():
                before = settings_now()
                loss.backward()
                assert settings_now() == before
            grads.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *grads))
    assert both.handle.plan.replayed


def test_the_deterministic_mode_of_a_backward_forbids_no_replay(twins: Any) -> None:
    """``put_`` raises in that mode, which the forward was not in."""

    class Puts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).exp()
            scale = torch.put(x.detach(), torch.arange(4), x.new_ones(4)).sin()
            return (x * scale).tanh().square().mean()

    torch.manual_seed(0)
    both = twins(Puts())
    x = torch.randn(32, 64)
    for _ in range(3):
        grads = []
        for model in (both.plain, both.limited):
            model.zero_grad()
            loss = model(x)
            torch.use_deterministic_algorithms(True)
            try:
                loss.backward()
            finally:
                torch.use_deterministic_algorithms(False)
            grads.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *grads))
    assert both.handle.plan.replayed
