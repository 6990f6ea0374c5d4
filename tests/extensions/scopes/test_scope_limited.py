"""Scopes in a limited model: the limit starts from what they do by themselves, and only improves on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scoped_model import Mlp, N
from torch import nn

import lowtide
from lowtide import BudgetError, checkpoint, checkpointing

Forward = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


def adjacent(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x)
    return x


def nested(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    with checkpointing():
        x = blocks[0](x)
        with checkpointing():
            x = blocks[1](x)
            with checkpointing():
                x = blocks[2](x)
        x = blocks[3](x).tanh()
    return x


def excepted(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        with checkpointing():
            y = block.up(block.norm(x))
            with checkpointing(policy="keep_all"):
                y = F.gelu(y).sin()
            x = x + block.drop(block.down(y))
    return x


def single_operations(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        with checkpointing():
            x = block.norm(x)
        with checkpointing():
            y = F.gelu(block.up(x))
        with checkpointing():
            x = block.down(y)
        x = block.drop(x)
    return x


def listed(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        with checkpointing(["aten.gelu", "aten.native_layer_norm"]):
            x = block(x)
    return x


def beside_a_call(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        with checkpointing():
            x = x + F.softmax(x @ x.T, -1) @ block.norm(x)
        x = checkpoint(block, x)
    return x


def every_other(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for k, block in enumerate(blocks):
        x = checkpoint(block, x) if k % 2 else block(x)
    return x


def several_readers(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    y = checkpoint(blocks[0], x)
    z = checkpoint(blocks[1], y)
    u = checkpoint(lambda a, b: blocks[2](a * b), z, checkpoint(blocks[3], y))
    return u + y + z


def entering_unsaved(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    """What enters is not saved there, only read by what runs again; and it is saved where it was made."""
    for block in blocks:
        with checkpointing():
            y = (block.down(F.gelu(block.up(x))) * 0.1).exp()
        with checkpointing():
            x = F.dropout(y, 0.3) + (y * 0.5).sin()
    return x


def in_place(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        with checkpointing():
            y = block.down(F.gelu(block.up(x))).sigmoid_()
            x = (y.clone().mul_(2) * x).relu_()
    return x


def recursive(blocks: Any, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
    if depth == 0:
        return x.sin()
    with checkpointing():
        return recursive(blocks, blocks[depth](x), depth - 1) + recursive(blocks, x.cos(), depth - 1)


FORWARDS = (
    adjacent, nested, excepted, single_operations, listed, beside_a_call, every_other, several_readers,
    entering_unsaved, in_place, recursive,
)  # fmt: skip


class Scoped(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList([Mlp() for _ in range(4)]), forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.blocks, x).square().mean()


def one_block(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    with checkpointing():
        for block in blocks:
            x = block(x)
    return x


def steps(forward: Forward, budget: str | int | None = None) -> tuple[int, list[Any], Any]:
    """The peak of a second step above its start, its gradients, and the handle of the limit."""
    torch.manual_seed(0)
    model, x = Scoped(forward), torch.randn(128, N)
    handle = lowtide.limit_memory(model, budget) if budget is not None else None
    peak = 0
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        peak = lowtide.measure(lambda: model(x).backward()).peak_bytes
    return peak, [p.grad for p in model.parameters()], handle


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_a_limit_takes_no_more_than_its_scopes_alone(forward: Forward, same: Any) -> None:
    """Wherever the budget is: with room for all, they are obeyed to the byte; at "min" nothing is above."""
    alone, expected, _ = steps(forward)
    roomy, gradients, handle = steps(forward, "1GiB")
    assert roomy == alone
    assert all(map(same, gradients, expected))
    assert handle.plan.predicted_extra_seconds == pytest.approx(handle.plan.bound_extra_seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)  # its first step may take more than it will
        least, gradients, _ = steps(forward, "min")
    assert least <= alone
    assert all(map(same, gradients, expected))


def test_what_no_scope_evicts_follows_the_budget(same: Any) -> None:
    """Below what the scopes take alone, their regions are still evicted, and so is more."""
    alone, expected, _ = steps(every_other)
    _, _, handle = steps(every_other, "1GiB")
    whole = handle.plan
    peak, gradients, handle = steps(every_other, int(whole.predicted_peak_bytes * 0.85))
    assert peak < 0.9 * alone
    assert set(whole.replayed) < set(handle.plan.replayed)
    assert all(map(same, gradients, expected))


def test_a_budget_below_what_scopes_take_is_met_where_keeping_more_does(same: Any) -> None:
    """One scope around all blocks holds all of them at once in backward: what it asks for cannot be obeyed
    below that, which the plan says.
    """
    alone, expected, _ = steps(one_block)
    roomy, _, handle = steps(one_block, "1GiB")
    assert roomy == alone and not any("scopes" in note for note in handle.plan.notes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        peak, gradients, handle = steps(one_block, handle.plan.predicted_peak_bytes // 2)
    assert peak < alone // 2
    assert any("scopes take more than this budget" in note for note in handle.plan.notes)
    assert all(map(same, gradients, expected))


def test_the_smallest_budget_of_a_refusal_works_with_scopes() -> None:
    with pytest.raises(BudgetError) as refused:
        steps(one_block, "20KiB")
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        _, _, handle = steps(one_block, smallest)
    assert handle.plan.predicted_peak_bytes <= smallest


@pytest.mark.parametrize("policy", ["full", "keep_all", "mixed"])
def test_other_policies_keep_what_enters_scopes(policy: str, same: Any) -> None:
    _, expected, _ = steps(adjacent)
    torch.manual_seed(0)
    model, x = Scoped(adjacent), torch.randn(128, N)
    handle = lowtide.limit_memory(model, "1GiB", policy=policy)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        model(x).backward()
    assert handle.graph is not None and handle.plan is not None
    again = [handle.graph.operations[index].name for index in handle.plan.replayed]
    # what leaves a block is a sum of two, and enters the next: no block's is made again
    assert again.count("aten.add.Tensor") == 0
    assert again.count("aten.gelu.default") == 4
    assert all(map(same, [p.grad for p in model.parameters()], expected))


@pytest.mark.parametrize(
    "forward", [adjacent, beside_a_call, single_operations, entering_unsaved], ids=lambda one: one.__name__
)
def test_the_first_step_takes_no_more_than_scopes_alone(forward: Forward) -> None:
    """It is divided where scopes begin and end, if few bytes cross there."""
    alone, _, _ = steps(forward)
    torch.manual_seed(0)
    model, x = Scoped(forward), torch.randn(128, N)
    lowtide.limit_memory(model, "1GiB")
    assert lowtide.measure(lambda: model(x).backward()).peak_bytes <= 1.01 * alone
