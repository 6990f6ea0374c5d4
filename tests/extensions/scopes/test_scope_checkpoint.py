"""`lowtide.checkpoint`: the call of `torch.utils.checkpoint.checkpoint`, by a scope."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scoped_model import Mlp, N, backward, batch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import lowtide
from lowtide import PlanError, ReplayError

aten = torch.ops.aten


class Stack(nn.Module):
    """Blocks, each called by ``call``."""

    def __init__(self, call: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Mlp() for _ in range(3)])
        self.call, self.options = call, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x, **self.options)
        return x.square().mean()


def plainly(function: Any, *args: Any) -> Any:
    return function(*args)


def grads(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(batch()).backward()
    return [p.grad.clone() for p in model.parameters()]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_reentrant": False},
    {"use_reentrant": None, "preserve_rng_state": True, "debug": False, "early_stop": True},
    {"determinism_check": "none", "context_fn": noop_context_fn},
]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_the_same_call_gives_the_same_gradients(same: Any, options: dict[str, Any]) -> None:
    expected = grads(Stack(plainly))
    rival = grads(Stack(checkpoint, **{**options, "use_reentrant": False}))
    model = Stack(lowtide.checkpoint, **options)
    for _ in range(2):
        found = grads(model)
        assert all(map(same, expected, found)) and all(map(same, rival, found))


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_in_a_limited_model(same: Any, budget: str) -> None:
    expected, model = grads(Stack(plainly)), Stack(lowtide.checkpoint)
    handle = lowtide.limit_memory(model, budget)
    for _ in range(3):
        assert all(map(same, expected, grads(model)))
    assert any(saved.forced for saved in handle.graph.saved)


def test_only_what_enters_is_held_and_only_what_is_needed_runs_again() -> None:
    torch.manual_seed(1)
    log = backward(Stack(lowtide.checkpoint)(batch()))
    assert log.count("gelu") == 3 and log.count("addmm") == 3


def test_arguments_results_and_gradients_off() -> None:
    def function(x: torch.Tensor, scale: float, *, shift: torch.Tensor) -> dict[str, Any]:
        return {"y": (x * scale + shift).exp(), "scale": scale}

    x, shift = batch().requires_grad_(), batch().requires_grad_()
    result = lowtide.checkpoint(function, x, 2.0, shift=shift)
    assert result["scale"] == 2.0
    result["y"].sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x + shift).exp().detach())
    with torch.no_grad():
        assert lowtide.checkpoint(torch.exp, x).grad_fn is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"use_reentrant": True}, r"use_reentrant=True\): .*drop it"),
        ({"preserve_rng_state": False}, r"preserve_rng_state=False\): .*drop it"),
        ({"debug": True}, r"debug=True\): .*drop it"),
        ({"early_stop": False}, r"early_stop=False\): .*drop it"),
        ({"determinism_check": "shapes"}, "use 'default' or 'none'"),
        ({"context_fn": lambda: (1, 2)}, "Drop context_fn"),
        (
            {"context_fn": functools.partial(create_selective_checkpoint_contexts, [aten.gelu], True)},
            "Drop context_fn",
        ),
    ],
    ids=lambda item: "-".join(item) if isinstance(item, dict) else "",
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        lowtide.checkpoint(torch.exp, batch().requires_grad_(), **options)


def test_without_a_determinism_check_nothing_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.run.record import tape

    def verified(*args: Any) -> str:
        raise ReplayError("verified")

    monkeypatch.setattr(tape, "why_not_reproduced", verified)
    function, x = nn.Linear(N, N), batch()
    lowtide.checkpoint(function, x, determinism_check="none").sum().backward()
    with pytest.raises(ReplayError, match="verified"):
        lowtide.checkpoint(function, x)


def keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    assert not ctx.is_recompute
    return CheckpointPolicy.MUST_SAVE if op is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "policy",
    [keeps_products, [aten.addmm.default], lambda ctx, op, *args: op is aten.addmm.default],
    ids=["function", "list", "lambda"],
)
def test_policies_of_selective_checkpointing(same: Any, policy: Any) -> None:
    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    expected, model = grads(Stack(plainly)), Stack(lowtide.checkpoint, context_fn=context_fn)
    assert all(map(same, expected, grads(model)))
    torch.manual_seed(1)
    log = backward(model(batch()))
    assert log.count("addmm") == 0 and log.count("gelu") == 3


def test_a_policy_that_offloads_is_refused() -> None:
    def offloads(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_CPU_OFFLOAD

    if not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"):
        pytest.skip("this PyTorch has no such policy")
    with pytest.raises(PlanError, match="keeps or evicts"):
        lowtide.checkpoint(
            F.gelu,
            batch().requires_grad_(),
            context_fn=functools.partial(create_selective_checkpoint_contexts, offloads),
        )
