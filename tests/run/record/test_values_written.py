"""Writes to what a replay starts from that are easily overlooked: by an operation that moves the version
counter before it writes. The gradients are the plain step's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

N = 48


@torch.library.custom_op("lowtide_test_written::halve_", mutates_args={"x"})
def halve_(x: torch.Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("lowtide_test_written::halve_and_sum", mutates_args={"x"})
def halve_and_sum(x: torch.Tensor) -> torch.Tensor:
    x.mul_(0.5)
    return x.sum()


@torch.library.custom_op("lowtide_test_written::swap", mutates_args={"x", "y"})
def swap(x: torch.Tensor, y: torch.Tensor) -> None:
    before = x.clone()
    x.copy_(y)
    y.copy_(before)


class Net(nn.Module):
    """Adds a table in each of its layers, whose sum no other tensor replaces.

    Attributes:
        between: called between two of its layers.
    """

    table: torch.Tensor
    other: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(N, N) for _ in range(3))
        self.register_buffer("table", torch.rand(N, N))
        self.register_buffer("other", torch.rand(N, N))
        self.between: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (layer(x) + self.table).sin().exp().tanh()
            self.between()
        return x.square().sum()


def by_custom(model: Net) -> None:
    halve_(model.table)


def by_custom_with_result(model: Net) -> None:
    halve_and_sum(model.table)


def by_custom_of_two(model: Net) -> None:
    swap(model.table, model.other)


def gradients(model: Net, change: Callable[[Net], None], when: str) -> list[torch.Tensor]:
    """Of four steps."""
    found: list[torch.Tensor] = []
    noise = torch.Generator().manual_seed(1)

    def write(*_: object) -> None:
        change(model)

    if when == "in_forward":
        model.between = write
    for _ in range(4):
        model.zero_grad()
        loss = model(torch.rand(N, N, generator=noise))
        if when == "between":
            write()
        if when == "in_backward":
            loss.register_hook(write)
        loss.backward()
        found += [one.grad for one in model.parameters() if one.grad is not None]
    return found


def check(change: Callable[[Net], None], when: str, **limit: Any) -> None:
    limited = Net()
    lowtide.limit_memory(limited, **limit)
    expected, own = gradients(Net(), change, when), gradients(limited, change, when)
    assert len(expected) == 24 and all(map(torch.equal, expected, own))


@pytest.mark.parametrize("limit", ["min", "policy"])
@pytest.mark.parametrize("when", ["in_forward", "between", "in_backward"])
@pytest.mark.parametrize("change", [by_custom, by_custom_with_result, by_custom_of_two])
def test_an_operation_moves_the_counter_before_it_writes(
    change: Any, when: str, limit: str, everything: Any
) -> None:
    check(change, when, **({"budget": "min"} if limit == "min" else {"policy": everything}))
