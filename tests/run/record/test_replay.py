"""Copies that replays make wait for those who can still ask for them, and for nobody else: what is predicted
is what is measured.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from small_model import needs_meter
from torch import nn

import lowtide
from lowtide import meter


class Unasked(torch.autograd.Function):
    """Saves what its backward does not look at."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.exp(x))
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].neg()


class Net(nn.Module):
    """``made`` has readers in a branch that autograd lets go of at some time without ever asking for anything
    in it.
    """

    def __init__(self, branch: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 64)
        self.branch = branch
        self.held: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.cos(self.first(x))
        if self.branch == "goes in forward":
            made = made * torch.sigmoid(torch.exp(made)).argmax(1, keepdim=True)
        elif self.branch == "goes in backward":
            made = Unasked.apply(made)
        elif self.branch == "stays":
            self.held.append(torch.sigmoid(torch.exp(made)).square())
        return self.last(torch.tanh(made)).square().mean()


@needs_meter
@pytest.mark.parametrize("branch", ["goes in forward", "goes in backward", "stays"])
def test_copies_wait_for_those_who_can_ask(branch: str, everything: Any) -> None:
    torch.manual_seed(0)
    net = Net(branch)

    def step(x: torch.Tensor) -> None:
        net(x).backward()
        net.held.clear()

    x = torch.randn(96, 32)
    graph = lowtide.trace(step, x, model=net, costs=False)
    plan = everything(graph)
    assert plan.replayed

    def limited() -> None:
        with lowtide.apply(plan, verify="never"):
            loss = net(x)
        loss.backward()
        net.held.clear()

    net.zero_grad()
    measured = meter.measure(limited, timeline=False)
    assert graph.resident_bytes + measured.peak_bytes == plan.predicted_peak_bytes


@needs_meter
def test_memory_that_was_filled_part_by_part_starts_a_replay() -> None:
    """As states of a scan are written one after the other: what is read of it last, a plan may compute again.
    It is kept no longer than was predicted.
    """

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            u = self.up(x)
            states = torch.empty_like(u)
            for at in range(u.shape[1]):
                states[:, at] = u[:, at].exp()
            return self.down(states * u.sigmoid())

    model, x = Scan(), torch.randn(64, 4, 16)

    def step() -> torch.Tensor:
        return model(x).square().mean()

    step().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    graph = lowtide.trace(step)
    product = next(operation for operation in graph.operations if operation.name == "aten.mul.Tensor").writes[
        0
    ]
    stored = {value.id for value in graph.values} - {product}
    plan = lowtide.policies.make_plan(graph, stored=stored)
    assert plan.replayed and plan.predicted_peak_bytes < plan.plain_peak_bytes
    with lowtide.apply(plan):
        took = lowtide.measure(lambda: step().backward()).peak_bytes
    assert graph.resident_bytes + took <= plan.predicted_peak_bytes
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, expected, found))


def test_an_operation_that_runs_a_second_time_leaves_what_others_still_wait_for() -> None:
    """The activation writes in place into what its own backward has a clone of: a later replay of it may not
    write into the cached copy that the clone is to be made of.
    """

    def gradient(evicted: bool) -> torch.Tensor:
        torch.manual_seed(0)
        weight, data = torch.randn(16, 16, requires_grad=True), torch.randn(8, 16)
        with lowtide.checkpointing() if evicted else nullcontext():
            active = nn.functional.hardswish(data @ weight, inplace=True)
            made = torch.sin(active)
        for _ in range(2):
            torch.autograd.grad(made.sum(), active, retain_graph=True)
        return torch.autograd.grad(made.sum(), weight)[0]

    assert torch.equal(gradient(True), gradient(False))
