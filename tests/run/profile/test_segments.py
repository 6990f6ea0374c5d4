"""Where the step that is looked at is divided, so that it takes little memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small_model import Block, needs_meter
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import meter


class Layers(nn.Module):
    """Layers in one forward, without modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(64, 64) / 8) for _ in range(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + torch.tanh(nn.functional.layer_norm(x, (64,)) @ weight)
        return x


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(64, 64, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


@needs_meter
@pytest.mark.parametrize("kind", [Layers, Unrolled])
def test_a_model_without_blocks_is_divided_where_few_bytes_cross(
    kind: type[nn.Module], same: Callable[..., bool]
) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(16, 40, 64)
    plain = copy.deepcopy(model)
    checkpointed = meter.measure(
        lambda: checkpoint(plain, x, use_reentrant=False).square().mean().backward(), timeline=False
    )
    lowtide.limit_memory(model, "100%")
    looked_at = meter.measure(lambda: model(x).square().mean().backward(), timeline=False)
    assert looked_at.peak_bytes < 0.8 * checkpointed.peak_bytes
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert same(a.grad, b.grad)


class OneLayer(nn.Module):
    """A loop whose rounds read slices of one projection, which the program holds as long as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(64, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0].square().mean()


@needs_meter
def test_the_first_step_of_a_loop_takes_less_than_a_plain_one() -> None:
    """It took 1.4 times as much: the loop was one segment, replayed as a whole."""
    model, x = OneLayer(), torch.randn(8, 128, 64)
    plain = meter.measure(lambda: model(x).backward(), timeline=False).peak_bytes
    model.zero_grad()
    lowtide.limit_memory(model, "100%")
    assert meter.measure(lambda: model(x).backward(), timeline=False).peak_bytes < plain


class Again(nn.Module):
    """One block, run several times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = self.block(x)
        return x


def deep() -> nn.Module:
    """A perceptron of 12 layers."""
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.GELU())))


@needs_meter
@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.Sequential(*(Block() for _ in range(8))), nn.Linear(32, 32)),
        Again,
        lambda: nn.Sequential(Again(), nn.Linear(32, 32)),
        deep,
    ],
    ids=["a list within a list", "one block again and again", "that one within a list", "layers only"],
)
def test_the_first_step_takes_little_memory(model: Callable[[], nn.Module]) -> None:
    """Whatever its lists of modules look like."""
    limited, x = model(), torch.randn(512, 32)

    def step() -> None:
        limited(x).sum().backward()

    plain = meter.measure(step).peak_bytes
    limited.zero_grad()
    lowtide.limit_memory(limited, "100%")
    assert meter.measure(step).peak_bytes < 0.6 * plain
