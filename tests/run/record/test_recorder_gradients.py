"""Gradients are the plain step's: of leaf inputs, of halves of a network, of weighted losses, under moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Limit, check, differences, run_limited, run_plain
from loops import data, loop
from torch import nn

BUDGETS = ["100%", "60%"]


class Sequences(nn.Module):
    """A recurrent layer under a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0]).square().mean()


class Speech(nn.Module):
    """A linear layer under CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        targets = torch.arange(x.shape[1] * 2).view(-1, 2) % 5 + 1
        lengths = torch.full((x.shape[1],), x.shape[0]), torch.full((x.shape[1],), 2)
        return F.ctc_loss(self.net(x).log_softmax(-1), targets, *lengths)


@pytest.mark.parametrize("kind", [Sequences, Speech])
@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_of_a_leaf_input_are_not_doubled(kind: type[nn.Module], budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(kind())
        for number in range(3):
            x = data(number, rows=24, width=8).view(6, 4, 8).requires_grad_()
            model(x).backward()
            yield model, x.grad

    check(pattern, budget)


@pytest.mark.parametrize("kind", [Sequences, Speech])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_second_half_of_a_network(kind: type[nn.Module], budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        encoder, model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8)), limit(kind())
        for number in range(3):
            model(encoder(data(number, rows=24, width=5).view(6, 4, 5))).backward()
            yield encoder, model

    check(pattern, budget)


class Classifier(nn.Module):
    """A small model under a weighted, smoothed cross entropy that ignores some targets."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)
        self.classes = int(torch.randint(3, 40, (), generator=self.random))
        width = int(torch.randint(4, 40, (), generator=self.random))
        self.net = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, self.classes))
        self.register_buffer("weight", torch.rand(self.classes, generator=self.random) + 0.1)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), targets, weight=self.weight, label_smoothing=0.1, ignore_index=1)


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.slow)], ids=["6", "54"]
)
def test_weighted_smoothed_cross_entropy(seeds: range) -> None:
    wrong = []
    for seed in seeds:

        def pattern(limit: Limit, seed: int = seed) -> Iterator[Any]:
            model = Classifier(seed)
            classes = model.classes
            limit(model)
            rows = 20 + seed
            for number in range(3):
                model.zero_grad()
                targets = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(number))
                loss = model(data(number, rows=rows), targets)
                loss.backward()
                yield loss, [p.grad for p in model.parameters()]

        wrong += [seed] if differences(run_plain(pattern), run_limited(pattern, "80%").steps) else []
    assert not wrong, f"{len(wrong)} of {len(seeds)} models differ: {wrong}"


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_mixed_policy_on_one_linear_layer(budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        yield from loop(limit(nn.Linear(16, 4), policy="mixed"))

    check(pattern, budget)
