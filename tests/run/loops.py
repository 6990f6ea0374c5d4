"""Small models, their batches, one step and the plain loop, what is warned of, and a table of patterns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from compare import Pattern
from torch import nn

STEPS = 3


class Patterns(dict[str, Pattern]):
    """Training code by name."""

    def add(self, function: Pattern) -> Pattern:
        """A decorator: the name is the function's, with spaces."""
        self[function.__name__.replace("_", " ")] = function  # type: ignore[attr-defined]
        return function


def mlp(
    width: int = 32, inputs: int = 16, outputs: int = 4, act: Callable[[], nn.Module] = nn.GELU
) -> nn.Sequential:
    """Three layers."""
    layers = [nn.Linear(inputs, width), act(), nn.Linear(width, width), act(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers)


def data(number: int, rows: int = 128, width: int = 16) -> torch.Tensor:
    """A batch, the same for the same number."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(number))


def step(model: nn.Module, number: int = 0) -> None:
    """One forward and backward."""
    model(data(number).to(next(model.parameters()).dtype)).float().square().mean().backward()


def said_by(run: Any) -> tuple[Any, list[warnings.WarningMessage]]:
    """What a function returns, and everything that it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return run(), caught


def sgd(*models: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    """An optimizer of what is trained in the models."""
    return torch.optim.SGD([p for model in models for p in model.parameters() if p.requires_grad], lr=lr)


def loop(
    model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor] | None = None, **kwargs: Any
) -> Iterator[Any]:
    """The plain loop: forward, backward, step."""
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        output = model(data(number, **kwargs))
        value = output.square().mean() if loss is None else loss(output)
        value.backward()
        yield model, value
        optimizer.step()
