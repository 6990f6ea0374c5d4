"""Seconds and scratch of a profiled step's operations."""

from __future__ import annotations

import time
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import pytest
import torch

import lowtide
from lowtide import meter
from lowtide.meter.allocator import Moments, Peak
from lowtide.ops import Call
from lowtide.run.profile.costs import CostMeter, MeasuredCost


def test_buffers_that_come_and_go_beside_a_collective_are_not_its_scratch() -> None:
    """Its threads hold a copy of the input a while longer, and let go of that of an earlier one."""
    pytest.importorskip("torch.distributed")
    import torch.distributed._functional_collectives

    held: list[torch.Tensor] = []

    def call(last: bool) -> torch.Tensor:
        if last:
            held.clear()
        held.append(torch.empty(64))
        return torch.empty(8)

    for func, expected in (
        (torch.ops._c10d_functional.reduce_scatter_tensor.default, 256),
        (torch.ops.aten.mm.default, 0),  # what is left of another operation is counted elsewhere
    ):
        costs, cost = CostMeter(torch.device("cpu")), MeasuredCost(is_collective="c10d" in str(func))
        for last in (False, True):
            costs.measure(cost, lambda last=last: call(last))
        assert cost.scratch_bytes == expected
        held.clear()


def test_a_few_runs_of_what_costs_the_same_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of thousands of equal operations is not slowed down by thousands of meters."""
    opened = 0

    def counted(device: torch.device) -> Any:
        def peak(timeline: bool) -> Any:
            nonlocal opened
            opened += 1
            return meter.peak(device, timeline=timeline)

        return peak

    monkeypatch.setattr("lowtide.run.profile.costs.peaks", counted)
    weight = torch.ones(16, requires_grad=True)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            x = torch.sin(x * weight)
        return x.sum()

    graph = lowtide.trace(chain, torch.ones(4, 16))
    kinds = {op.name for op in graph.operations}
    assert len(graph.operations) > 200 and opened <= 15 * len(kinds)
    assert len({op.seconds for op in graph.operations if op.name == "aten.sin.default"}) == 1


def test_the_first_run_of_a_kind_says_little() -> None:
    """It may search for a kernel, as cuDNN does, and is timed cold: what is measured of the others counts, in
    backward, too, which runs once. Of a single run there is nothing else.
    """
    costs, cost, single = CostMeter(torch.device("cpu")), MeasuredCost(), MeasuredCost()

    def searching() -> torch.Tensor:
        torch.ones(1 << 20)
        begin = time.thread_time()
        while time.thread_time() < begin + 0.02:
            pass
        return torch.ones(4)

    for found in (cost, single):
        costs.measure(found, searching)
    for _ in range(2):
        costs.measure(cost, lambda: torch.ones(4))
    (seconds, scratch, _), (cold_seconds, cold_scratch, _) = cost.read(), single.read()
    assert seconds < 0.01 < cold_seconds and scratch < 1 << 20 < cold_scratch


class Listed(Peak):
    """Reads out what a device's allocator was asked for, as on CUDA."""

    lists: ClassVar[list[tuple[int, ...]]] = []

    def _open(self) -> None:
        pass

    def _read(self) -> tuple[int, int]:
        return 0, 0

    def _close(self) -> tuple[tuple[int, int], Moments]:
        live = accumulate(self.lists.pop(0)) if self.with_timeline else ()
        return (0, 0), tuple((0.0, bytes) for bytes in live)


def test_blocks_are_those_of_a_warm_run_in_the_order_in_which_they_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the allocator is modelled, the first run's count only where there is no other."""
    monkeypatch.setattr("lowtide.run.profile.costs.peaks", lambda device: partial(Listed, device))
    costs, cost, single = CostMeter(torch.device("cpu")), MeasuredCost(), MeasuredCost()
    monkeypatch.setattr(costs, "_lists", True)
    monkeypatch.setattr(Listed, "lists", [(9000, -9000), (64, 512, 512, -4, -512, 8, -512, -8), (100,)])
    for found in (cost, cost, cost, single):
        costs.measure(found, lambda: None)
    assert cost.read()[2] == (64, 512, 512, -3, 8, -2, -4)  # what was resident before is nobody's here
    assert single.read()[2] == (100,) and not Listed.lists


def test_what_others_take_is_no_cost_of_an_operation() -> None:
    """Other programs on a CPU, and other ranks that a collective waits for."""
    costs, cost = CostMeter(torch.device("cpu")), MeasuredCost()

    def waiting() -> torch.Tensor:
        time.sleep(0.05)
        return torch.ones(4)

    costs.measure(cost, waiting)
    assert cost.read()[0] < 0.02


def test_calls_that_differ_in_where_they_write_cost_the_same() -> None:
    aten, costs = torch.ops.aten, CostMeter(torch.device("cpu"))

    def cost(func: Any, *args: Any, **kwargs: Any) -> MeasuredCost:
        return costs.of(Call(func, args, kwargs))

    row, rows = torch.ones(4), torch.ones(2, 4)
    select, cut, fresh = aten.select_backward.default, aten.slice_backward.default, aten.arange.start
    assert cost(select, row, [8, 4], 0, 3) is cost(select, row, [8, 4], 0, 5)
    assert cost(select, row, [8, 4], 0, 3) is not cost(select, row, [9, 4], 0, 3)
    assert cost(cut, rows, [8, 4], 0, 0, 2, 1) is cost(cut, rows, [8, 4], 0, 2, 4, 1)
    assert cost(cut, rows, [8, 4], 0, 0, 2, 1) is not cost(cut, rows, [8, 4], 0, 0, 4, 2)
    assert cost(fresh, 0, 8) is not cost(fresh, 0, 4000), "there it says how much"


class Depthwise(torch.nn.Module):
    """Saves much before a convolution whose backward takes much scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(16, 16, 1) for _ in range(6))
        self.depthwise = torch.nn.Conv2d(16, 16, 7, padding=3, groups=16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.depthwise(x.contiguous(memory_format=torch.channels_last)).square().mean()


def scratch_of_convolutions(budget: str) -> tuple[list[int], int]:
    """Scratch of each convolution's backward in the graph of a first step; that step's peak."""
    torch.manual_seed(0)
    model = Depthwise()
    handle = lowtide.limit_memory(model, budget, progress=False)
    model(torch.randn(8, 16, 16, 16)).backward()
    assert handle.graph is not None and handle.measured_peak_bytes is not None
    found = [op.scratch_bytes for op in handle.graph.operations if "convolution_backward" in op.name]
    return found, handle.measured_peak_bytes


def test_what_is_evicted_for_an_operation_is_no_part_of_its_scratch() -> None:
    """Live bytes fall while room is made; the operation runs after that."""
    (roomy, most), (tight, least) = map(scratch_of_convolutions, ("1GiB", "1800KiB"))
    assert least <= 1800 * 1024 < most, "nothing had to be evicted"
    assert tight == roomy and max(roomy) > 0
