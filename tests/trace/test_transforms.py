"""Gradients that meet, whose sums autograd's engine makes in place or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import private
from lowtide.interception import Interceptor, proceed


class Sums(Interceptor):
    """Notes additions in backward; it looks at no storage, so that the engine does as ever."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note it and pass it on."""
        if private.in_backward() and "aten.add" in str(func):
            self.names.append(str(func))
        return proceed(func, args, kwargs)


class Uses(nn.Module):
    """What its layer makes is used several times."""

    def __init__(self, uses: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.uses = nn.Linear(8, 8), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.uses(self.layer(self.layer(self.layer(x))).exp()).sum()


@pytest.mark.parametrize(
    "uses",
    [
        lambda y: y.sin() + y.cos() + y.tanh() + y.exp(),
        lambda y: y.view(-1).sin().sum() + y.view(-1).cos().sum() + y.tanh().sum(),
        lambda y: y.sin() + (y.tanh() + y).exp(),
    ],
    ids=["a chain", "views", "one that goes two ways"],
)
def test_sums_are_in_place_as_in_the_plain_step(uses: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, x = Uses(uses), torch.randn(4, 8)
    seen = Sums()
    with seen:
        model(x).backward()
    model.zero_grad()
    graph = lowtide.trace(lambda: model(x), model=model)
    traced = [op.name for op in graph.operations if op.phase == "backward" and op.name.startswith("aten.add")]
    assert traced == seen.names
    assert "aten.add_.Tensor" in traced
