"""A forecast counts what kernels are given, and is of the halves that run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn

from lowtide.compiled import price
from lowtide.compiled.alone import forecast
from lowtide.compiled.choose_cuts import Choice, with_prices
from lowtide.compiled.joint import Joint
from lowtide.compiled.kernels import KernelCosts
from lowtide.compiled.lower import Generated, Traffic
from lowtide.compiled.price import CandidateCuts, costs_of, half_seconds, parts_of
from lowtide.plan.choose import at_or_smallest
from lowtide.private import inductor, partitioning

ROWS, WIDTH = 64, 48


class Seen(Exception):
    """Ends a compilation."""


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


class Look(inductor.CustomPartitionerFn):
    """Shows the plain halves to a test, with what is predicted of them."""

    def __call__(self, gm: Any, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        partitioning.clean_joint(gm)
        self.joint = joint = Joint(partitioning.twin(gm), num_fwd_outputs, (), partitioning.default_fusible())
        self.costs = costs_of(joint)
        self.halves = partitioning.min_cut(joint.module, num_fwd_outputs, ())
        self.memory = Generated(joint, {}, {}, self.halves)(joint.size)
        raise Seen

    def uuid(self) -> None:
        return None


def look_at(model: nn.Module, *args: torch.Tensor) -> Look:
    """The joint graph of a model as Inductor has it, and what is predicted of its plain halves."""
    found = Look()
    compiled = torch.compile(
        model,
        backend=lambda module, inputs: inductor.compile_with(
            module, inputs, {"custom_partitioner_fn": found}
        ),
    )
    with pytest.raises(inductor.BackendCompilerFailed) as failed:
        compiled(*args)
    assert isinstance(failed.value.inner_exception, Seen)
    return found


@pytest.fixture
def look() -> Look:
    return look_at(Relu(), torch.randn(2, ROWS // 2, 16))  # a view of the ReLU is saved, and not the ReLU


class Words(nn.Module):
    """A cross entropy over many words, in float32, of logits in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 2048, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x).float(), targets)


def test_what_a_backward_computes_within_its_readers_takes_no_memory() -> None:
    x = torch.randn(ROWS, 16, dtype=torch.bfloat16, requires_grad=True)
    found = look_at(Words(), x, torch.randint(2048, (ROWS,)))
    joint, (_, backward) = found.joint, found.memory
    writes = [joint.bytes[key] for call in joint.calls if not call.forward for key in call.writes]
    assert max(writes) == 2 * ROWS * 2048  # the logits' gradient, and not its float32 before it
    assert backward.peak_bytes < 3 * 2 * ROWS * 2048


class Tied(nn.Module):
    """An embedding that is the head, too, and between them more than the logits take."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2048, 16)
        self.up, self.down = nn.Linear(16, 8192, bias=False), nn.Linear(8192, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(nn.functional.gelu(self.up(self.tokens(x))))
        return nn.functional.cross_entropy(hidden @ self.tokens.weight.t(), x)


def planned_and_taken(found: Look) -> tuple[int, int]:
    """What the least plan is predicted to take, and what the text of its cut says."""
    cuts = CandidateCuts(found.joint, {}, 0)
    choice = Choice(cuts.timeline, [cuts], cuts.step, "min")
    plan = at_or_smallest(cuts.step.graph, 1)
    return plan.predicted_peak_bytes, choice.peak((cuts.of(plan, cuts.step, 0),))


class Head(nn.Module):
    """A head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 2048, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x), targets)


def test_a_product_that_is_added_late_runs_where_it_stands() -> None:
    planned, taken = planned_and_taken(look_at(Tied(), torch.randint(2048, (ROWS,))))
    hidden, logits = 4 * ROWS * 8192, 4 * ROWS * 2048
    assert taken == planned
    assert taken < 2 * hidden + 1.5 * logits  # beside which the gradient of the logits stood


def test_what_a_kernel_writes_over_what_it_reads_counts_once() -> None:
    planned, taken = planned_and_taken(look_at(Head(), torch.randn(ROWS, 16), torch.randint(2048, (ROWS,))))
    assert taken == planned < 2 * 4 * ROWS * 2048


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
