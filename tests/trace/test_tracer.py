"""Gradients that meet, whose sums autograd's engine makes in place or not; steps that take gradients inside
their forward, or all by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import private
from lowtide.interception import Interceptor, proceed
from lowtide.meter import available


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


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_gradient_inside_the_step_is_not_its_backward(own: bool, fake: bool) -> None:
    """Forces are the energy's gradient, and the loss is made of both."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = model(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = energy + force.square().sum()
        if own:
            loss.backward(retain_graph=True)
        return loss

    graph = lowtide.trace(step, torch.randn(3, 4), model=model, costs=False, fake=fake)
    gone = {event.index for event in graph.events if event.kind == "free"}
    stay = Counter(s.bytes for s in graph.storages if s.kind == "backward" and s.id not in gone)
    assert Counter(p.nbytes for p in model.parameters()) <= stay  # and the gradient of x, perhaps
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_may_take_its_gradients_by_itself() -> None:
    model = nn.Linear(4, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        torch.autograd.grad(loss, list(model.parameters()))
        return loss

    graph = lowtide.trace(step, torch.randn(3, 4), model=model, costs=False)
    assert sum(o.name == "aten.pow.Tensor_Scalar" for o in graph.operations if o.phase == "backward") == 1


class Messages(nn.Module):
    """Residual layers of a network for energies, with the forces in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        h = x
        for layer in self.layers:
            h = h + torch.nn.functional.silu(layer(h * x))
        (force,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h.square().mean() + force.square().mean()


@pytest.mark.skipif(not available(), reason="needs a C++ compiler for the counting allocator")
@pytest.mark.parametrize("budget", ["min", "100%"])
def test_gradients_that_add_up_within_the_forward_are_predicted(budget: str) -> None:
    """Autograd adds in place where nothing else holds a gradient; one that it saved is held."""
    model = Messages()
    handle = lowtide.limit_memory(model, budget)
    for _ in range(3):
        model(torch.randn(256, 32)).backward()
        model.zero_grad()
    assert handle.plan is not None and handle.measured_peak_bytes is not None
    assert abs(handle.plan.predicted_peak_bytes - handle.measured_peak_bytes) <= 4096


@pytest.mark.skipif(not available(), reason="needs a C++ compiler for the counting allocator")
def test_a_penalty_on_gradients_alone_is_measured_to_its_end() -> None:
    """Its backward never comes to the output, which is gone by then."""
    model = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
    handle = lowtide.limit_memory(model, "min")

    def step() -> None:
        x = torch.randn(128, 32).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.norm(dim=1) - 1).square().mean().backward()

    for _ in range(3):
        step()
        model.zero_grad()
    assert handle.plan is not None and handle.plan.replayed and handle.measured_peak_bytes is not None
    assert abs(handle.plan.predicted_peak_bytes - handle.measured_peak_bytes) <= 4096
