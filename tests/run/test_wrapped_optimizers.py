"""Optimizers inside wrappers: accelerate's `AcceleratedOptimizer` hands everything on and is not an optimizer
of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import meter
from lowtide.meter.resident import innermost
from lowtide.optim import HostOptimizer
from lowtide.run.limit.need import optimizer_need


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))


def wrapped(optimizer: torch.optim.Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for step in range(3):
        model(torch.randn(256, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def on_host(parameters: Any) -> torch.optim.Optimizer:
    return HostOptimizer(torch.optim.AdamW, parameters, host_fraction=0.5, lr=1e-2)


@pytest.mark.parametrize("make", [adamw, on_host])
def test_a_limit_counts_what_accelerate_wraps(make: Any) -> None:
    plans, results, standing = [], [], []
    for wrap in (lambda optimizer: optimizer, wrapped):
        model = net()
        optimizer = wrap(make(model.parameters()))
        handle = lowtide.limit_memory(model, budget="90%", optimizer=optimizer)
        results.append(steps(model, optimizer))
        plans.append(handle.plan)
        standing.append(meter.resident_bytes(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (
        plans[0].budget_bytes == plans[1].budget_bytes
        and plans[0].predicted_peak_bytes == plans[1].predicted_peak_bytes
    )
    assert standing[0] == standing[1]


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another, with state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})


def test_what_has_state_of_its_own_is_left_as_it_is() -> None:
    inner = adamw(net().parameters())
    assert innermost(inner) is inner
    outer = Lookahead(inner)
    assert innermost(outer) is outer
    accelerated = wrapped(wrapped(inner))
    assert innermost(accelerated) is inner
    assert optimizer_need(innermost(accelerated)) == optimizer_need(inner)
