"""What is recorded: by a plan, until the step departs from it, or by the rule of a scope."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from function_model import N, batch, make
from loops import data
from torch import nn

import lowtide
from lowtide import policies


class Departs(nn.Module):
    """Runs other operations where it is told to, which no argument shows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.wide = nn.Parameter(torch.randn(32, 32))
        self.low = nn.Parameter(torch.randn(256, 16, dtype=torch.bfloat16))
        self.departure = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.departure == "another operation":
            x = x.sin()
        elif self.departure == "another shape":
            x = x[:100]
        elif self.departure == "another dtype":
            x = x.double()
        w = [layer.weight.to(x.dtype) for layer in (self.one, self.two, self.three)]
        if self.departure == "another shape of the same bytes":
            h = (x.view(64, 32) @ self.wide).view(128, 16)
        elif self.departure == "another dtype of the same bytes":
            w = [self.low[at : at + 16] for at in (0, 16, 32)]
            h = self.low @ w[0]
        else:
            h = x @ w[0]
        return F.gelu(F.gelu(h) @ w[1]).mul(2).matmul(w[2]).square().mean()


@pytest.mark.parametrize(
    "departure",
    [
        "another operation",
        "another shape",
        "another shape of the same bytes",
        "another dtype",
        "another dtype of the same bytes",
    ],
)
def test_a_departing_step_is_given_no_lossy_moves(departure: str) -> None:
    torch.manual_seed(0)
    plain, limited = Departs(), Departs()
    limited.load_state_dict(plain.state_dict())
    handle = lowtide.limit_memory(limited, policy=policies.compress("int8", min_bytes=1))
    grads: list[list[torch.Tensor]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        for number in range(4):
            plain.departure = limited.departure = departure if number == 3 else ""
            for model in (plain, limited):
                model.zero_grad()
                model(data(number)).backward()
                grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert handle.plan is not None and handle.plan.moves
    assert any(not torch.equal(a, b) for a, b in zip(grads[4], grads[5], strict=True)), (
        "the plan's codec loses nothing"
    )
    assert all(torch.equal(a, b) for a, b in zip(grads[6], grads[7], strict=True))


@pytest.mark.parametrize("limited", [False, True], ids=["alone", "in a limited model"])
def test_a_scopes_rule_is_called_once_for_each_operation(limited: bool) -> None:
    """Under a limit in the step that is written down: from then on its plan has the rule's decisions."""
    asked: list[str] = []

    def every_other_product(name: str) -> bool:
        asked.append(name)
        return name == "aten.mm.default" and asked.count(name) % 2 == 0

    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lowtide.checkpointing(every_other_product):
                for weight in self.weights:
                    x = (x @ weight).tanh()
            return x.square().mean()

    model = Scoped()
    if limited:
        lowtide.limit_memory(model, "100%")
    for number in range(2):
        asked.clear()
        model(data(number)).backward()
        expected = 0 if limited and number else 4
        assert asked.count("aten.mm.default") == asked.count("aten.tanh.default") == expected


def test_a_step_that_runs_other_operations_than_its_trace(twins: Any) -> None:
    """`one_hot` looks at its numbers when they are there, and does not on fake tensors."""

    def function(h: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            h = torch.nn.functional.one_hot(h.argmax(-1), N) * h.exp() + h.sin() * h
        return h

    pair = twins(make(function))
    for seed in range(3):
        pair.step(lambda m: m(batch()), seed)
    assert pair.handle.plan.replayed
