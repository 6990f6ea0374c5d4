"""Under Inductor the first cut for fixed sizes is compiled before it is priced: its peak is read then."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compiled import choose_cuts, planning
from lowtide.meter import peak, resident_bytes
from lowtide.private import inductor

Compiled = tuple[Any, int, int, nn.Module]
"""A handle, what a step takes, how many halves were lowered only to look, and the model."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Block(64) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def compiled(budget: str | int) -> Compiled:
    """A step within a budget, and the model with its gradients."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(1024, 64)
    with mock.patch.object(inductor, "generated", side_effect=inductor.generated) as lowered:
        step = lowtide.compile(model, budget)
        step(x).backward()
    model.zero_grad(set_to_none=True)
    resident = resident_bytes(model) + x.nbytes
    with peak("cpu") as seen:
        step(x).backward()
    return lowtide.handle_of(step), seen.peak_bytes + resident, lowered.call_count, model


@pytest.fixture(scope="module")
def whole() -> Compiled:
    """A step that fits as it is."""
    return compiled("100%")


def test_a_plain_step_is_compiled_without_a_look_before(whole: Compiled) -> None:
    handle, real, lowered, _ = whole
    assert lowered == 0
    assert handle.plan.changes_nothing
    assert handle.plan.predicted_peak_bytes == handle.plan.plain_peak_bytes
    assert abs(real - handle.plan.predicted_peak_bytes) <= 16


def test_bytes_are_held_by_a_cut_that_nobody_looked_at_before(whole: Compiled) -> None:
    plain, most, _, other = whole
    handle, real, lowered, model = compiled(int(0.8 * most))
    assert lowered == 0
    assert handle.plan.replayed and len(handle.plans) == 1
    assert abs(real - handle.plan.predicted_peak_bytes) <= 16
    assert 0.97 * handle.plan.budget_bytes <= real <= handle.plan.budget_bytes
    assert handle.plain_peak_bytes == pytest.approx(plain.plain_peak_bytes, rel=choose_cuts.DOUBT)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_a_share_is_of_the_plain_peak_exactly(whole: Compiled) -> None:
    plain, _, _, _ = whole
    handle, real, lowered, _ = compiled("80%")
    assert lowered == 2, "the plain halves"
    assert handle.plain_peak_bytes == plain.plain_peak_bytes
    assert handle.plan.budget_bytes == int(0.8 * plain.plain_peak_bytes)
    assert 0.97 * handle.plan.budget_bytes <= real <= handle.plan.budget_bytes


@pytest.mark.parametrize("first", [0.85, 1.18], ids=["leaves much", "takes too much"])
def test_a_guess_that_is_refused_is_followed_by_another_and_nothing_is_lowered_twice(
    first: float, monkeypatch: pytest.MonkeyPatch, whole: Compiled
) -> None:
    _, most, _, _ = whole
    monkeypatch.setattr(choose_cuts, "FIRST", first)
    with (
        mock.patch.object(inductor, "compile_half", side_effect=inductor.compile_half) as halves,
        mock.patch.object(planning, "CandidateCuts", side_effect=planning.CandidateCuts) as timed,
    ):
        handle, real, lowered, _ = compiled(int(0.8 * most))
    assert lowered == 0 and halves.call_count == 4, "each cut is lowered as it is compiled"
    assert timed.call_count == 1, "operations are timed once"
    assert len(handle.plans) == 1
    assert abs(real - handle.plan.predicted_peak_bytes) <= 16
    assert 0.97 * handle.plan.budget_bytes <= real <= handle.plan.budget_bytes


def test_the_smallest_budget_is_compiled_without_a_look_where_the_plan_is_met() -> None:
    handle, real, lowered, _ = compiled("min")
    assert lowered == 0
    assert handle.plan.replayed
    assert abs(real - handle.plan.predicted_peak_bytes) <= 16


class Broken(nn.Sequential):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__(Block(64), Block(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        torch._dynamo.graph_break()
        return self[1](x).square().mean()


def recorded(budget: int) -> tuple[Any, int]:
    """A recorded step within a budget, and how many halves were lowered only to look. Its gradients are those
    of `torch.compile` alone.
    """
    model, twin, x = Broken(), Broken(), torch.randn(1024, 64)
    twin.load_state_dict(model.state_dict())
    with mock.patch.object(inductor, "generated", side_effect=inductor.generated) as lowered:
        step, plain = lowtide.compile(model, budget), torch.compile(twin)
        for _ in range(2):
            for one, forward in ((model, step), (twin, plain)):
                one.zero_grad(set_to_none=True)
                forward(x).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    handle = lowtide.handle_of(step)
    assert handle.measured_peak_bytes <= handle.budget_bytes
    assert handle.measured_peak_bytes == pytest.approx(handle.predicted_peak_bytes, abs=16)
    return handle, lowered.call_count


def test_cuts_of_a_recorded_step_are_compiled_before_they_are_priced() -> None:
    handle, lowered = recorded(5_452_595)
    assert lowered == 0
    assert handle.plan.replayed and handle.plain_peak_bytes > 1.1 * handle.budget_bytes


def test_a_guess_for_a_recorded_step_that_is_refused_is_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose_cuts, "FIRST", 1.15)
    with mock.patch.object(inductor, "compile_half", side_effect=inductor.compile_half) as halves:
        handle, lowered = recorded(5_452_595)
    assert lowered == 0 and halves.call_count > 4, "more than one try"
    assert handle.plan.replayed


def test_the_partitioner_can_be_pickled_and_tells_budgets_apart() -> None:
    one, other = (lowtide.compile_options(budget)["custom_partitioner_fn"] for budget in ("60%", "70%"))
    assert pickle.loads(pickle.dumps(one)).uuid() == one.uuid() != other.uuid()
