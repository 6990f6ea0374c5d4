"""Operations are timed one at a time without a trace: no memory, no random state, no other process is
touched.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from call_specs import Watch, aten, needs_allocator, one, spec_of
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.meter import peak
from lowtide.trace.costs import timing
from lowtide.trace.costs.roofline import Roofline
from lowtide.trace.costs.specs import OpSpec, TensorSpec, flops, runnable
from lowtide.trace.costs.timing import Bench, estimate, measure_costs


@needs_allocator
@pytest.mark.parametrize(
    ("spec", "scratch"),
    [
        (OpSpec(aten.mul.Tensor, (spec_of(64, 64), spec_of(64, 64, key=1))), 0),
        (OpSpec(aten.add_.Tensor, (spec_of(64, 64), spec_of(64, 64, key=1))), 0),
        (OpSpec(aten.view.default, (spec_of(64, 64), [4096])), 0),
        (OpSpec(aten.relu.default, (spec_of(64, 64, stride=(1, 64)),)), 0),
        (OpSpec(aten.cat.default, ([spec_of(5, 7), spec_of(5, 7, key=1)],)), 0),
    ],
)
def test_operations_are_measured(spec: OpSpec, scratch: int) -> None:
    cost = one(spec)
    assert cost.source == "measured"
    assert 0 < cost.seconds < 1
    assert cost.scratch_bytes == scratch


@needs_allocator
def test_scratch_is_what_comes_and_goes_within() -> None:
    cost = one(
        OpSpec(
            aten.native_layer_norm_backward.default,
            (
                spec_of(64, 32),
                spec_of(64, 32, key=1),
                [32],
                spec_of(64, 1, key=2),
                spec_of(64, 1, key=3),
                spec_of(32, key=4),
                spec_of(32, key=5),
                [True] * 3,
            ),
        )
    )
    assert cost.source == "measured"
    assert cost.scratch_bytes >= 2 * 32 * 4  # a partial sum of both weight gradients per thread


def test_random_state_stays_as_it_was() -> None:
    generator = torch.Generator()
    torch.manual_seed(3)
    before, own = torch.get_rng_state(), generator.get_state()
    specs = {
        "dropout": OpSpec(aten.native_dropout.default, (spec_of(1000), 0.5, True)),
        "normal": OpSpec(aten.normal_.default, (spec_of(1000),), {"generator": generator}),
    }
    costs = measure_costs(specs, time_budget=0.05)
    assert {c.source for c in costs.values()} == {"measured"}
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), own)


@needs_allocator
def test_no_memory_stays() -> None:
    specs = {n: OpSpec(aten.mm.default, (spec_of(64, n), spec_of(n, 64, key=1))) for n in range(64, 80)}
    measure_costs(specs, time_budget=0.1)
    gc.collect()  # or what other tests left would be freed within
    with peak() as seen:
        measure_costs(specs, time_budget=0.1)
        assert seen.live_bytes == 0


def test_no_mode_sees_what_runs() -> None:
    spec = OpSpec(aten.mm.default, (spec_of(8, 8), spec_of(8, 8, key=1)))
    with Watch() as watch, torch.autocast("cpu", dtype=torch.bfloat16):
        assert one(spec).source == "measured"
    assert watch.seen == []
    with FakeTensorMode():
        cost = one(spec)
    assert cost.source == "measured"
    with torch.device("meta"):
        assert one(spec).source == "measured"


def test_what_the_inputs_do_not_suit_is_estimated() -> None:
    cost = one(OpSpec(aten.mm.default, (spec_of(3, 4), spec_of(5, 6, key=1))))
    assert cost.source == "estimated"
    assert cost.seconds > 0
    spd = one(OpSpec(aten.linalg_cholesky_ex.default, (spec_of(4, 4),), {"check_errors": True}))
    assert spd.source == "estimated"


def test_other_namespaces_are_never_run() -> None:
    ran: list[int] = []
    with torch.library._scoped_library("lowtide_costs_test", "DEF") as library:
        library.define("touch(Tensor x) -> Tensor")

        def touch(x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            return x.clone()

        library.impl("touch", touch, "CompositeExplicitAutograd")
        func = torch.ops.lowtide_costs_test.touch.default
        assert not runnable(func)
        assert one(OpSpec(func, (spec_of(1000),), output_bytes=4000)).source == "estimated"
    assert ran == []
    assert not runnable(torch.ops._c10d_functional.all_reduce.default)


def test_what_would_not_fit_is_estimated() -> None:
    spec = OpSpec(aten.neg.default, (spec_of(1000),), output_bytes=4000)
    assert one(spec, memory_limit_bytes=7999).source == "estimated"
    assert one(spec, memory_limit_bytes=8000).source == "measured"


def test_absent_devices_are_estimated() -> None:
    there = TensorSpec(4000, torch.float32, (1000,), (1,), 0, torch.device("meta"), 0)
    assert one(OpSpec(aten.neg.default, (there,))).source == "estimated"


def test_the_time_budget_is_kept_to() -> None:
    specs = {n: OpSpec(aten.mm.default, (spec_of(512 + n, 512), spec_of(512, 512, key=1))) for n in range(60)}
    costs = measure_costs(specs, time_budget=0.001)
    assert len(costs) == 60
    assert any(c.source == "estimated" for c in costs.values())


def test_estimates_follow_the_roofline() -> None:
    line = Roofline(1e9, 1e8, 1e-6)
    product = OpSpec(aten.mm.default, (spec_of(100, 200), spec_of(200, 300, key=1)), output_bytes=120_000)
    assert flops(product) == 2 * 100 * 200 * 300
    assert estimate(product, line).seconds == pytest.approx(1e-6 + 12e6 / 1e9)
    copy = OpSpec(aten.neg.default, (spec_of(1000),), output_bytes=4000)
    assert flops(copy) == 0
    assert estimate(copy, line).seconds == pytest.approx(1e-6 + 8000 / 1e8)
    image, weight = spec_of(1, 3, 8, 8), spec_of(4, 3, 3, 3, key=1)
    convolution = OpSpec(
        aten.convolution.default, (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    )
    assert flops(convolution) == 2 * 36 * 4 * 27


class FakeClock:
    """Time that passes only in runs: so many seconds for each call of an overload."""

    def __init__(self, seconds: dict[Any, float]) -> None:
        self.seconds, self.now, self.runs = seconds, 0.0, dict[Any, int]()
        self.inputs: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def of(self, device: torch.device) -> FakeClock:
        """As `Clock`."""
        return self

    def time(self, call: Any) -> tuple[Any, Any]:
        spec, args = (cell.cell_contents for cell in self._cells(call))
        self.inputs.append(float(args[0].flatten()[0]))
        key = (spec.func, args[0].shape)
        self.runs[key] = self.runs.get(key, 0) + 1
        taken = self.seconds.get(key, self.seconds.get(spec.func, 0.001))
        self.now += taken
        return call(), lambda: taken

    @staticmethod
    def _cells(call: Any) -> list[Any]:
        found = dict(zip(call.__code__.co_freevars, call.__closure__, strict=True))
        return [found["spec"], found["args"]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock({})
    monkeypatch.setattr(timing, "Clock", found.of)
    monkeypatch.setattr(timing, "time", found)
    return found


LINE = Roofline(1e10, 1e10, 1e-6)


def test_a_few_heavy_operations_leave_time_for_the_others(clock: FakeClock) -> None:
    clock.seconds[aten.mm.default] = 1.5
    specs = {n: OpSpec(aten.mm.default, (spec_of(n, n), spec_of(n, n, key=1))) for n in (100, 101)}
    specs |= {n: OpSpec(aten.neg.default, (spec_of(n, 2),)) for n in range(2, 22)}
    costs = measure_costs(specs, roofline=LINE)
    assert all(cost.source == "measured" for cost in costs.values())
    assert costs[100].seconds == 1.5 and clock.runs[aten.mm.default, (100, 100)] == 1
    assert all(clock.runs[aten.neg.default, (n, 2)] >= 2 for n in range(2, 22))


def test_what_would_take_too_long_is_estimated_by_how_far_off_lighter_calls_were(clock: FakeClock) -> None:
    """The light one takes seven times its estimate; the heavy one would take 70 seconds."""
    light, heavy = ((spec_of(n, 100), spec_of(100, 100, key=1)) for n in (1000, 5_000_000))
    specs = {n: OpSpec(aten.mm.default, args) for n, args in enumerate((light, heavy))}
    guess = [estimate(spec, LINE).seconds for spec in specs.values()]
    clock.seconds[aten.mm.default] = 7 * guess[0]
    costs = measure_costs(specs, roofline=LINE)
    assert costs[0].source == "measured" and costs[1].source == "estimated"
    assert costs[1].seconds == pytest.approx(7 * guess[1]) and guess[1] > 9


def test_a_run_that_is_slower_for_being_watched_counts_for_nothing(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def profiled(_: torch.device) -> Iterator[SimpleNamespace]:
        clock.seconds[aten.neg.default] = 100.0
        yield SimpleNamespace(source="profiler", live_bytes=0, peak_bytes=1 << 20)
        clock.seconds[aten.neg.default] = 0.5

    monkeypatch.setattr(timing, "peak", profiled)
    assert one(OpSpec(aten.neg.default, (spec_of(4, 4),)), roofline=LINE).seconds == 0.5


def test_in_place_operations_start_from_fresh_inputs(clock: FakeClock) -> None:
    """Run after run on its own result it would reach denormals and zero."""
    Bench().time(OpSpec(aten.mul_.Scalar, (spec_of(100), 1e-30)), share=0.01, long=1.0)
    assert len(clock.inputs) >= 3 and set(clock.inputs) == {clock.inputs[0]}
