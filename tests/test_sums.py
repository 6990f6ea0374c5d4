"""Gradients that meet: a watched step adds them up as one that runs alone does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import meter
from lowtide.plan.simulate import Simulator


class Meeting(nn.Module):
    """A weight whose product enters ``meet`` as ``h`` (256 KiB)."""

    def __init__(self, meet: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.meet = meet

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.meet(torch.tanh(x @ self.weight))


class Squared(torch.autograd.Function):
    """A formula of a user's own, which adds to the gradient that it is given, and looks at that again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        more = grads[0] + x
        return (more * 2 - grads[0]) * x


def rows(h: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor] = torch.sin) -> torch.Tensor:
    """Four readers of a quarter of ``h`` each, whose gradients are as large as all of it."""
    parts = h.view(4, -1)
    return torch.stack([read(parts[i]).sum() for i in range(4)]).sum()


MEETINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two readers": lambda h: (h.sin() * 2 + h.cos()).sum(),
    "four slices": rows,
    "a residual": lambda h: ((h + (2 * h.sin()).cos()) * 3).sum(),
    "a residual whose gradient is broadcast": lambda h: (h + (2 * h.sin()).cos()).sum(),
    "a residual around slices": lambda h: ((h + rows(h)) * 3).sum(),
    "a residual around one operation": lambda h: ((h + h.sin()) * h.exp()).sum(),
    "both factors": lambda h: (h * h).sin().sum(),
    "a bias on the way": lambda h: ((h.sin() + h[0]).exp() * h).sum(),
    "pieces of one gradient": lambda h: (torch.cat([h.sin(), h.cos()], 0) * 2).exp().sum(),
    "transposed slices": lambda h: rows(h.t().contiguous()) + rows(h, torch.cos),
    "a formula that adds": lambda h: torch.lerp(h.sin(), h.cos(), h.exp()).sum() + torch.logsumexp(h * 2, 0).sum(),
    "a formula of two results": lambda h: torch.stack(torch.var_mean(2 * h, 0)).sin().sum(),
    "a user's formula that adds": lambda h: (Squared.apply(h.sin()) * h.cos()).sum(),  # type: ignore[operator]
    "a norm's formula": lambda h: (torch.linalg.vector_norm(h.sin(), 3, dim=1)[:, None] * h).sum(),
}

IN_PLACE = {
    "two readers": 1,
    "four slices": 3,
    "a residual": 1,
    "a residual around slices": 4,
    "a formula of two results": 0,
    "a user's formula that adds": 1,
}
"""How many of backward's sums autograd runs in place, where that is plain to see."""


@pytest.mark.parametrize("name", MEETINGS)
def test_the_plain_peak_is_exact(name: str) -> None:
    model, x = Meeting(MEETINGS[name]), torch.randn(1024, 64)
    graph = lowtide.trace(lambda: model(x), model=model)

    def step() -> None:
        model(x).backward()

    standing = meter.resident_bytes(model) + x.nbytes
    assert Simulator(graph).plain_peak == standing + meter.measure(step).peak_bytes
    if name in IN_PLACE:
        assert [op.name for op in graph.operations if op.phase == "backward"].count("aten.add_.Tensor") == IN_PLACE[name]


@pytest.mark.parametrize("name", MEETINGS)
def test_a_step_under_a_plan_adds_up_as_a_plain_one(name: str) -> None:
    model, x = Meeting(MEETINGS[name]), torch.randn(1024, 64)
    model(x).backward()
    expected = model.weight.grad
    plan = lowtide.plan(lowtide.trace(lambda: model(x), model=model), policy="sqrt")
    standing = meter.resident_bytes(model) + x.nbytes
    model.weight.grad = None
    applied = lowtide.apply(plan, verify="never")

    def step() -> None:
        with applied:
            model(x).backward()

    measured = standing + meter.measure(step).peak_bytes - (expected.nbytes if expected is not None else 0)
    assert plan.predicted_peak_bytes >= measured
    assert expected is not None and model.weight.grad is not None and torch.equal(expected, model.weight.grad)


def test_gradients_that_others_hold_are_not_written_to() -> None:
    model, x, seen = Meeting(MEETINGS["two readers"]), torch.randn(64, 64), []

    def meet(h: torch.Tensor) -> torch.Tensor:
        parts = h.sin(), h.cos()
        for part in parts:
            assert part.grad_fn is not None
            part.grad_fn.register_hook(lambda inputs, _: seen.append((inputs[0], inputs[0].clone())))
        return (parts[0] * 2 + parts[1]).sum()

    model.meet = meet
    plan = lowtide.plan(lowtide.trace(lambda: model(x), model=model), policy="sqrt")
    seen.clear()
    with lowtide.apply(plan):
        model(x).backward()
    assert len(seen) == 2 and all(torch.equal(now, then) for now, then in seen)
