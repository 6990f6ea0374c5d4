"""Graphs that leave sizes open: every step is within the budget, by few plans."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compiled.dynamic import largest, largest_product
from lowtide.meter import peak, resident_bytes


class Model(nn.Module):
    """Two layers on rows of any number and length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def stepped(compiled: nn.Module, model: nn.Module, x: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """The second step's peak, what was resident before it included, and its gradients."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        resident = resident_bytes(model) + x.nbytes
        with peak("cpu") as seen:
            compiled(x).backward()
    return seen.peak_bytes + resident, [p.grad for p in model.parameters() if p.grad is not None]


Mark = Callable[[torch.Tensor], None]


def unmarked(x: torch.Tensor) -> None:
    """Left to automatic dynamic shapes."""


def mark_lengths(x: torch.Tensor) -> None:
    torch._dynamo.mark_dynamic(x, 1)


def mark_both(x: torch.Tensor) -> None:
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)


@pytest.mark.parametrize(
    ("mark", "shapes", "plans"),
    [
        (unmarked, [(8, 64), (8, 100), (8, 200), (8, 220), (8, 50), (8, 256), (8, 210), (8, 64)], 5),
        (mark_lengths, [(8, 100), (8, 200), (8, 205), (8, 210), (8, 240), (8, 90)], 3),
        (mark_both, [(8, 200), (16, 100), (4, 400), (32, 40), (20, 80), (8, 50)], 1),
    ],
    ids=["automatic", "marked", "both"],
)
def test_every_length_is_within_the_budget_by_few_plans(
    mark: Mark, shapes: list[tuple[int, int]], plans: int
) -> None:
    model, budget = Model(), 2_200_000
    twin = copy.deepcopy(model)
    compiled = lowtide.compile(model, budget, backend="aot_eager")
    for shape in shapes:
        x = torch.randn(*shape, 16)
        mark(x)
        real, gradients = stepped(compiled, model, x)
        assert real <= budget, shape
        twin.zero_grad(set_to_none=True)
        twin(x).backward()
        assert all(map(torch.equal, gradients, (p.grad for p in twin.parameters())))
    handle = lowtide.handle_of(compiled)
    assert handle is not None and any(plan.replayed for plan in handle.plans)
    assert len(handle.plans) <= plans


def test_a_declared_range_gets_one_plan_for_its_largest_size() -> None:
    model = Model()
    compiled = lowtide.compile(model, 2_000_000, backend="aot_eager")
    for length in (50, 100, 200):
        x = torch.randn(8, length, 16)
        torch._dynamo.mark_dynamic(x, 1, min=2, max=200)
        real, _ = stepped(compiled, model, x)
        assert real <= 2_000_000
    assert len(lowtide.handle_of(compiled).plans) == 1


def test_a_range_that_no_plan_holds_for_is_refused_with_its_size() -> None:
    compiled = lowtide.compile(Model(), 2_000_000, backend="aot_eager")
    x = torch.randn(8, 100, 16)
    torch._dynamo.mark_dynamic(x, 1, min=2, max=4000)
    with pytest.raises(lowtide.BudgetError, match="too small") as refused:
        compiled(x)
    assert "= 4000, the largest that mark_dynamic" in str(refused.value)


def test_a_share_holds_for_every_size() -> None:
    model = Model()
    compiled = lowtide.compile(model, "70%", backend="aot_eager")
    for length in (100, 300):
        x = torch.randn(8, length, 16)
        mark_lengths(x)
        real, _ = stepped(compiled, model, x)
        twin = copy.deepcopy(model)
        plain, _ = stepped(torch.compile(twin, backend="aot_eager", dynamic=True), twin, x)
        assert 0.6 * plain < real <= 0.7 * plain
    assert len(lowtide.handle_of(compiled).plans) == 1


def test_sizes_that_follow_from_data_are_told() -> None:
    class Chosen(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[x[:, 0] > 0])

    compiled = lowtide.compile(Chosen(), "100%", backend="aot_eager")
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.warns(lowtide.LowtideWarning, match="depend on data"),
    ):
        compiled(torch.randn(100, 16)).backward()


def test_two_sizes_are_bounded_by_their_product_where_only_that_counts() -> None:
    assert largest_product((8, 100), lambda s: 1600 - s[0] * s[1]) == 1600
    assert largest_product((8, 100), lambda s: 80_000 - s[0] * s[1] * s[1]) == 0


@pytest.mark.parametrize("most", [2, 333, 10**5])
def test_the_largest_size_is_exact(most: int) -> None:
    assert largest((2,), lambda s: most**2 - s[0] ** 2) == (most,)


@pytest.mark.parametrize("summed", [True, False], ids=["one graph", "recorded"])
def test_a_share_that_is_too_small_for_a_small_step_is_of_the_largest(summed: bool) -> None:
    """The last batch of an epoch: parameters are most of it, and it fits where larger ones do."""

    class Net(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x.square().mean() if summed else x

    model = Net(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU())
    compiled = lowtide.compile(model, "90%", backend="aot_eager")
    for rows in (1024, 1024, 8, 8):
        compiled.zero_grad(set_to_none=True)
        compiled(torch.randn(rows, 64)).sum().backward()
    largest, smallest = lowtide.handle_of(compiled).plans
    assert smallest.budget_bytes == largest.budget_bytes
    with pytest.raises(lowtide.BudgetError):  # nothing larger was planned for
        lowtide.handle_of(compiled).set_budget("90%")
        for _ in range(2):
            compiled(torch.randn(8, 64)).sum().backward()
