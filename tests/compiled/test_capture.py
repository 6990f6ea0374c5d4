"""Programs with more to them than layers: bit by bit those of eager under ``aot_eager``, budgets held."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.meter import peak, resident_bytes


class Program(nn.Module):
    """Six layers, two halves of three."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.register_buffer("mean", torch.zeros(32))

    def half(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for layer in self.layers[first : first + 3]:
            x = functional.gelu(layer(x))
        return x


class Plain(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.half(self.half(x, 0), 3).square().mean()


class Autocast(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.half(self.half(x, 0), 3)
        return x.float().square().mean()


class Buffers(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.half(x, 0)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.half(x + self.mean, 3).square().mean()


class InPlace(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 2 * self.half(x, 0)
        y[0] = 1.0
        return self.half(y.relu_(), 3).square().mean()


class LowRank(Program):
    """Frozen layers with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(4, 32) / 6 for _ in range(6))
        self.up = nn.ParameterList(torch.randn(32, 4) / 6 for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = functional.gelu(layer(x) + x @ down.t() @ up.t())
        return x.square().mean()


class Torchs(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.half, x, 0, use_reentrant=False)
        return self.half(x, 3).square().mean()


class TorchsTwice(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (0, 3):
            x = checkpoint(self.half, x, first, use_reentrant=False)
        return x.square().mean()


class Called(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.half(lowtide.checkpoint(self.half, x, 0), 3).square().mean()


class Marked(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with lowtide.checkpointing():
            x = self.half(x, 0)
        return self.half(x, 3).square().mean()


class MarkedTwice(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (0, 3):
            with lowtide.checkpointing():
                x = self.half(x, first)
        return x.square().mean()


class Attends(Program):
    """Attention without dropout, whose operation PyTorch counts as random."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(4, 128, 32)
        for layer in self.layers:
            h = layer(x).unflatten(-1, (2, 16)).transpose(1, 2)
            x = functional.scaled_dot_product_attention(h, h, h, is_causal=True).transpose(1, 2).flatten(2)
        return x.square().mean()


class MarkedThenCalled(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with lowtide.checkpointing():
            x = self.half(x, 0)
        return lowtide.checkpoint(self.half, x, 3).square().mean()


def step(model: nn.Module, callee: Any, x: torch.Tensor) -> int:
    """Forward and backward; the peak, what stood before included."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    standing = resident_bytes(model) + x.nbytes
    with peak("cpu") as seen:
        callee(x).backward()
    return standing + seen.peak_bytes


def results(model: nn.Module) -> list[torch.Tensor]:
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def run(kind: type[Program], budget: str) -> tuple[Any, int]:
    """Three steps beside an eager twin; the handle and the last peak."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(512, 32)
    twin = copy.deepcopy(model)
    compiled = lowtide.compile(model, budget, backend="aot_eager")
    for _ in range(3):
        real = step(model, compiled, x)
        step(twin, twin, x)
        assert all(map(torch.equal, results(model), results(twin)))
    handle = lowtide.handle_of(compiled)
    assert real <= handle.plan.budget_bytes + 16
    assert abs(real - handle.predicted_peak_bytes) <= 16
    return handle, real


@pytest.mark.parametrize("kind", [Autocast, Buffers, InPlace, LowRank])
def test_bit_by_bit_and_within_the_smallest_budget(kind: type[Program]) -> None:
    handle, _ = run(kind, "min")
    assert handle.plan.replayed


def test_attention_without_dropout_is_recomputed() -> None:
    handle, _ = run(Attends, "min")
    assert any("attention" in step.name and step.replayed for step in handle.plan.program)


def test_marked_regions_are_what_the_user_wishes() -> None:
    _, plain = run(Plain, "100%")
    peaks = {kind: run(kind, "100%")[1] for kind in (Torchs, Called, Marked)}
    twice = {kind: run(kind, "100%")[1] for kind in (TorchsTwice, MarkedTwice, MarkedThenCalled)}
    assert peaks[Called] == peaks[Marked] == peaks[Torchs] < plain
    assert len(set(twice.values())) == 1, f"what enters the second region is kept: {twice}"


def test_a_region_that_compiled_code_cannot_honour_is_refused() -> None:
    class Listed(Program):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lowtide.checkpointing([torch.ops.aten.gelu]):
                return self.half(x, 0).square().mean()

    compiled = lowtide.compile(Listed(), "100%", backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"None, 'full' or 'keep_all'"):
        compiled(torch.randn(8, 32))


def test_an_option_without_a_meaning_in_a_compiled_region_is_named() -> None:
    class Asked(Program):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return lowtide.checkpoint(self.half, x, 0, preserve_rng_state=False).square().mean()

    compiled = lowtide.compile(Asked(), "100%", backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"preserve_rng_state=False.*drop it"):
        compiled(torch.randn(8, 32))
