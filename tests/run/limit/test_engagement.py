"""Limits that never engage: they are told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import data, mlp, sgd
from torch import nn

import lowtide


class Wrapper(nn.Module):
    """A module in Lightning's manner: its own forward is for inference, and ``training_step`` calls what it
    wraps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()


class Autoencoder(nn.Module):
    """A model whose two halves are called by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(), nn.Linear(4, 16)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(z)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def _messages(model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor], steps: int = 3) -> list[str]:
    """What lowtide says in a loop that computes its loss as it likes."""
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(steps):
            optimizer.zero_grad()
            loss(data(number)).backward()
            optimizer.step()
    return [str(w.message) for w in caught if issubclass(w.category, lowtide.LowtideWarning)]


def test_a_wrapper_whose_forward_never_runs_is_said() -> None:
    model = Wrapper()
    lowtide.limit_memory(model, "70%")
    messages = _messages(model, model.training_step)
    assert len(messages) == 1 and "Wrapper" in messages[0] and "net" in messages[0], messages


def test_halves_that_are_called_by_themselves_are_said() -> None:
    model = Autoencoder()
    lowtide.limit_memory(model, "70%")
    messages = _messages(model, lambda x: F.mse_loss(model.decode(model.encode(x)), x))
    assert len(messages) == 1 and "Autoencoder" in messages[0], messages
    assert "encoder" in messages[0] and "decoder" in messages[0], messages


class Energies(nn.Module):
    """A model with a method of its own, that calls no module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 4))

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.energy(x)


def test_modules_deep_inside_that_are_called_by_themselves_are_said() -> None:
    model = nn.Sequential(nn.ModuleDict({"backbone": mlp()}))
    lowtide.limit_memory(model, "70%")
    messages = _messages(model, lambda x: model[0]["backbone"](x).square().mean())  # type: ignore[index]
    assert len(messages) == 1 and "(0.backbone did)" in messages[0], messages


def test_a_method_without_modules_is_said() -> None:
    model = Energies()
    lowtide.limit_memory(model, "70%")
    messages = _messages(model, lambda x: model.energy(x).square().mean())
    assert len(messages) == 1 and "method" in messages[0], messages


def test_a_penalty_on_weights_before_the_first_step_is_no_step() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        return model(x).square().mean()

    model = mlp()
    lowtide.limit_memory(model, "100%")
    assert not [text for text in _messages(model, loss) if "engaged" in text]


class Features(nn.Module):
    """A model whose loss is made of what its forward leaves on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(outputs=16)

    def forward(self, x: torch.Tensor) -> Any:
        self.features = [x := layer(x) for layer in self.layers]


class Yields(Features):
    """A model whose forward is a generator."""

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield (x := layer(x))


@pytest.mark.parametrize("kind", [Features, Yields])
def test_a_forward_that_returns_nothing_for_backward_is_said_once(kind: type[Features]) -> None:
    model = kind()
    lowtide.limit_memory(model, "100%")

    def loss(x: torch.Tensor) -> torch.Tensor:
        found = model(x)
        return torch.stack([one.square().mean() for one in found or model.features]).sum()

    assert ["backward begins" in message for message in _messages(model, loss)].count(True) == 1


@pytest.mark.parametrize("given_loss", [False, True], ids=["loss measured", "loss given"])
def test_a_limit_that_engages_says_nothing(given_loss: bool) -> None:
    model = mlp()
    given = {"loss_fn": lambda output: output.square().mean()} if given_loss else {}
    handle = lowtide.limit_memory(model, "100%", **given)
    assert _messages(model, lambda x: model(x).square().mean(), steps=6) == []
    assert handle.plan is not None


def step(model: nn.Module) -> None:
    """One forward and backward."""
    model(data(0)).square().mean().backward()


def test_a_limit_that_never_engages_is_told_where_the_step_is_run() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

    module = Module()
    lowtide.limit_memory(module, "80%")
    with pytest.warns(lowtide.LowtideWarning, match="has not engaged") as said:
        step(module.net)
    assert said[0].filename == __file__


@pytest.mark.parametrize("first", ["prepared", "paused"])
def test_it_is_told_as_well_after_a_first_look_or_a_pause(first: str) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    module = Module()
    handle = lowtide.limit_memory(module, "100%", loss_fn=lambda output: output.square().mean())
    if first == "prepared":
        handle.prepare(data(0))
    else:
        with handle.paused():
            step(module.net)
    with pytest.warns(lowtide.LowtideWarning, match="has not engaged"):
        step(module.net)
