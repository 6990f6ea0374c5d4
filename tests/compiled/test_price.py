"""A forecast counts what kernels are given, and is of the halves that run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from joint_graphs import ROWS, WIDTH, Look, look_at
from torch import fx, nn

from lowtide.compiled import price
from lowtide.compiled.choose_cuts import with_prices
from lowtide.compiled.lower import Traffic
from lowtide.compiled.planning import forecast
from lowtide.compiled.price import CandidateCuts, half_seconds, parts_of
from lowtide.compiled.vector_costs import KernelCosts


def costs(mask_written: float, mask_read: float, **functions: float) -> AbstractContextManager[object]:
    """A machine whose kernels take so many seconds an element."""
    given = KernelCosts(mask_written, mask_read, functions)
    return mock.patch.object(price, "kernel_costs", lambda: given)


class Relu(nn.Module):
    """A product on either side of a ReLU, whose mask `torch.compile` stores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH, bias=False), nn.Linear(WIDTH, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))).sum()


@pytest.fixture
def look() -> Look:
    return look_at(Relu(), torch.randn(2, ROWS // 2, 16))  # a view of the ReLU is saved, and not the ReLU


def test_masks_are_counted_where_they_are_written_and_where_they_are_read(look: Look) -> None:
    forward, backward = (half.traffic for half in look.memory)
    assert (forward.masks_written, forward.masks_read) == (ROWS * WIDTH, 0)
    assert (backward.masks_written, backward.masks_read) == (0, ROWS * WIDTH)
    assert forward.bytes >= 4 * ROWS * WIDTH  # the ReLU, in place
    assert backward.bytes >= 4 * ROWS * WIDTH


def test_masks_that_are_handed_over_are_likely_to_cost_what_kernels_take_for_them(look: Look) -> None:
    cuts = CandidateCuts(look.joint, {})
    with costs(0.0, 0.0):
        without = cuts.likely_seconds(cuts.plain)
        assert without > 0
    with costs(2.0, 1.0):
        assert cuts.likely_seconds(cuts.plain) - without == pytest.approx(3 * ROWS * WIDTH)
    unmasked = cuts.candidate(frozenset())  # computes the product again, and the mask within what reads it
    with costs(2.0, 1.0):
        assert without < cuts.likely_seconds(unmasked) < 1.0


def test_each_product_counts_in_the_half_that_runs_it(look: Look) -> None:
    parts = parts_of(look.costs)
    quiet = Traffic()

    def products(half: fx.GraphModule) -> float:
        return sum(parts[node.name] for node in half.graph.nodes if node.target is torch.ops.aten.mm.default)

    first, second = look.halves
    only = {name: one for name, one in parts.items() if "mm" in name}
    assert half_seconds(first, quiet, only, "cpu") == pytest.approx(products(first))
    assert half_seconds(second, quiet, only, "cpu") == pytest.approx(products(second))
    assert 0 < products(first) < products(first) + products(second)


def test_masks_cost_what_they_take_on_a_cpu(look: Look) -> None:
    with costs(8.0, 3.0):
        assert half_seconds(look.halves[0], Traffic(0, 64, 0), {}, "cpu") == 64 * 8
        assert half_seconds(look.halves[0], Traffic(0, 0, 64), {}, "cpu") == 64 * 3
        assert half_seconds(look.halves[0], Traffic(0, 64, 64), {}, "cuda") == 0


class Curve(nn.Module):
    """Functions of two kinds between products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH, bias=False), nn.Linear(WIDTH, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sin(self.first(x)) * 2 + 1).pow(2).sum()


def test_a_function_costs_what_it_adds_to_a_kernel_and_arithmetic_nothing() -> None:
    with costs(0.0, 0.0, sin=2.0, cos=1.0, pow=5.0, mul=0.0):
        parts = parts_of(look_at(Curve(), torch.randn(ROWS, 16)).costs)
    fused = {name: seconds for name, seconds in parts.items() if "mm" not in name}
    assert {"sin", "cos", "pow_1"} <= fused.keys() and len(fused) > 5
    assert {name: seconds for name, seconds in fused.items() if seconds} == {
        "sin": 2.0 * ROWS * WIDTH,
        "cos": 1.0 * ROWS * WIDTH,
    }


class Loss(nn.Module):
    """Layers of ReLU with a loss."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_a_cut_without_slow_masks_is_forecast_to_be_faster() -> None:
    x = torch.randn(2, 1024, 256)
    with costs(1e-6, 1e-6):
        slow = forecast(Loss(), "90%", x)
    with costs(0.0, 0.0):
        quick = forecast(Loss(), "90%", x)
    assert slow.predicted_extra_seconds < -1 < quick.predicted_extra_seconds
    assert slow.gap_seconds < 0.5 * slow.plain_seconds


def test_a_forecast_leaves_the_distance_from_the_bound() -> None:
    plan = forecast(Loss(), "90%", torch.randn(2, 256, 256))
    plan = replace(plan, predicted_extra_seconds=0.5, bound_extra_seconds=0.25)
    found = with_prices(plan, 3, 2, 4, seconds=3.0, plain_seconds=4.0)
    assert (found.plain_seconds, found.predicted_extra_seconds) == (4.0, -1.0)
    assert found.gap_seconds == 0.25


@pytest.mark.parametrize("seconds", [5.0, 4.0, 3.0])
def test_the_table_adds_up_to_the_forecast(seconds: float) -> None:
    """The planner's single calls add up to other seconds than what the kernels of both cuts are given."""
    plan = forecast(Loss(), "90%", torch.randn(2, 256, 256))
    assert plan.modules
    for rows in (plan.modules, ()):
        found = with_prices(replace(plan, modules=rows), 3, 2, 4, seconds=seconds, plain_seconds=4.0)
        total = sum(row.extra_seconds for row in found.modules)
        assert total == pytest.approx(found.predicted_extra_seconds) == seconds - 4.0


def test_a_graph_that_fits_takes_no_extra_time() -> None:
    plan = forecast(Loss(), "100%", torch.randn(2, 256, 256))
    assert plan.predicted_extra_seconds == 0 and plan.gap_seconds == 0
    assert half_seconds(fx.symbolic_trace(nn.ReLU()), Traffic(), {}, "cpu") == 0
