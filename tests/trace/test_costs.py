"""Operations are timed one at a time without a trace: no memory, no random state, no other process is
touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lowtide.meter import available, counting_allocator
from lowtide.trace.costs import (
    OpCost,
    OpSpec,
    Roofline,
    TensorSpec,
    calibrate,
    estimate,
    executor_overheads,
    flops,
    measure_costs,
    runnable,
)

aten = torch.ops.aten
CPU = torch.device("cpu")


def spec_of(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    key: int = 0,
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
) -> TensorSpec:
    strides = stride or torch.empty(shape, device="meta").stride()
    count = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
    return TensorSpec(count * dtype.itemsize, dtype, shape, strides, offset, CPU, key)


class Watch(TorchDispatchMode):
    """Looks at the inputs of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def one(spec: OpSpec, **options: Any) -> OpCost:
    return measure_costs({"it": spec}, time_budget=0.05, **options)["it"]


needs_allocator = pytest.mark.skipif(not available(), reason="no C++ compiler here")


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
    assert 0 < cost.seconds < 0.1
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


def test_a_few_heavy_operations_leave_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, runs = [0.0], {}

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, Any]:
        seconds = 1.5 if func is aten.mm.default else 0.001
        clock[0] += seconds
        runs[args[0].shape] = runs.get(args[0].shape, 0) + 1
        return seconds, func(*args, **kwargs)

    monkeypatch.setattr("lowtide.trace.costs.Bench._run_cpu", staticmethod(run))
    monkeypatch.setattr("lowtide.trace.costs.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    specs = {n: OpSpec(aten.mm.default, (spec_of(n, n), spec_of(n, n, key=1))) for n in (100, 101)}
    specs |= {n: OpSpec(aten.neg.default, (spec_of(n, 2),)) for n in range(2, 22)}
    costs = measure_costs(specs, roofline=Roofline(1e10, 1e10, 1e-6))
    assert all(cost.source == "measured" for cost in costs.values())
    assert costs[100].seconds == 1.5 and runs[100, 100] == runs[101, 101] == 1
    assert all(runs[n, 2] >= 2 for n in range(2, 22))


def test_a_run_that_is_slower_for_being_watched_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watching: list[bool] = []
    clock = [0.0]

    @contextmanager
    def profiled(_: torch.device) -> Iterator[SimpleNamespace]:
        watching.append(True)
        yield SimpleNamespace(source="profiler", live_bytes=0, peak_bytes=1 << 20)
        watching.clear()

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, Any]:
        seconds = 100.0 if watching else 0.5
        clock[0] += seconds
        return seconds, func(*args, **kwargs)

    monkeypatch.setattr("lowtide.trace.costs.Bench._run_cpu", staticmethod(run))
    monkeypatch.setattr("lowtide.trace.costs.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr("lowtide.trace.costs.peak", profiled)
    assert one(OpSpec(aten.neg.default, (spec_of(4, 4),)), roofline=Roofline(1e10, 1e10, 1e-6)).seconds == 0.5


def test_inputs_have_their_layout_and_share_storages() -> None:
    base = spec_of(8, 8)
    other = TensorSpec(base.storage_bytes, torch.float32, (4, 8), (1, 4), 32, CPU, 0)
    spec = OpSpec(aten.mul.Tensor, (other, other))
    assert spec.input_bytes() == 256
    assert one(spec).source == "measured"
    # FSDP frees storages: there is nothing in it, and still it is timed
    freed = TensorSpec(0, torch.float32, (4, 8), (8, 1), 0, CPU, 0)
    assert one(OpSpec(aten.neg.default, (freed,))).source == "measured"
    wide = spec_of(4, 1 << 20, stride=(0, 1))
    assert wide.bytes == 4 << 20
    assert spec_of(0, 5, stride=(5, 1)).bytes == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
)
def test_inputs_are_finite_and_not_denormal(dtype: torch.dtype) -> None:
    from lowtide.trace.costs import Bench

    bench = Bench()
    data = bench._storage([spec_of(600_000, dtype=dtype)]).view(dtype)
    parts = (torch.view_as_real(data) if dtype.is_complex else data).double()
    assert parts.min() > 0.05
    assert parts.max() < 1
    assert parts.var() > 0.01


def test_integers_are_valid_indices_and_masks_let_everything_through() -> None:
    table, index = spec_of(50, 8), spec_of(3, 4, dtype=torch.int64, key=1)
    assert one(OpSpec(aten.embedding.default, (table, index))).source == "measured"
    mask = spec_of(4, 4, dtype=torch.bool, key=1)
    assert one(OpSpec(aten.masked_fill.Scalar, (spec_of(4, 4), mask, 0.0))).source == "measured"
    assert one(OpSpec(aten.bernoulli.default, (spec_of(100),))).source == "measured"


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
    allocator = counting_allocator()
    specs = {n: OpSpec(aten.mm.default, (spec_of(64, n), spec_of(n, 64, key=1))) for n in range(64, 80)}
    measure_costs(specs, time_budget=0.1)
    allocator.install()
    try:
        before = allocator.live_bytes
        measure_costs(specs, time_budget=0.1)
        assert allocator.live_bytes == before
    finally:
        allocator.uninstall()


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


@needs_allocator
def test_a_memory_limit_holds_for_earlier_outputs_too() -> None:
    allocator = counting_allocator()
    specs = {
        n: OpSpec(aten.neg.default, (spec_of(100_000 + n),), output_bytes=4 * (100_000 + n))
        for n in range(10)
    }
    allocator.install()
    try:
        mark = allocator.mark()
        calibrate()
        allocator.close_mark(mark)
        mark = allocator.mark()
        measure_costs(specs, time_budget=0.2, memory_limit_bytes=1_000_000)
        # the pattern and its making come on top
        assert allocator.mark_peak(mark) <= 1_000_000 + (1 << 20) + 20_000_000
        allocator.close_mark(mark)
    finally:
        allocator.uninstall()


@needs_allocator
def test_scratch_and_weights_count_once_where_a_limit_leaves_little_room() -> None:
    image, weight = spec_of(1, 8, 16, 16, 16), spec_of(8, 8, 3, 3, 3, key=1)
    spec = OpSpec(
        aten.convolution.default,
        (image, weight, None, [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
        output_bytes=8 * 16**3 * 4,
    )
    scratch = one(spec).scratch_bytes
    assert scratch > 10 * spec.input_bytes()  # unfolded patches
    stands = torch.randn(8, 8, 3, 3, 3)
    before = stands.clone()
    # the pattern comes on top; a copy of the weights would take 6,912 bytes
    limit = 2 * image.bytes + scratch + 24_000
    allocator = counting_allocator()
    calibrate(room=limit)
    allocator.install()
    try:
        mark = allocator.mark()
        found = one(spec, memory_limit_bytes=limit, held_limit_bytes=limit, standing=[stands])
        assert found.source == "measured"
        assert found.scratch_bytes == scratch
        assert allocator.mark_peak(mark) <= limit
        allocator.close_mark(mark)
    finally:
        allocator.uninstall()
    assert torch.equal(stands, before)


def test_the_cache_is_used_and_filled() -> None:
    known = OpCost(123.0, 5, "measured")
    cache: dict[str, OpCost] = {"a": known}
    specs = {"a": OpSpec(aten.neg.default, (spec_of(10),)), "b": OpSpec(aten.neg.default, (spec_of(20),))}
    costs = measure_costs(specs, cache=cache, time_budget=0.05)
    assert costs["a"] is known
    assert cache["b"] == costs["b"]
    assert set(cache) == {"a", "b"}
    assert measure_costs({}) == {}


def test_the_time_budget_is_kept_to() -> None:
    specs = {n: OpSpec(aten.mm.default, (spec_of(512 + n, 512), spec_of(512, 512, key=1))) for n in range(60)}
    calibrate()
    begin = time.perf_counter()
    costs = measure_costs(specs, time_budget=0.02)
    assert len(costs) == 60
    assert time.perf_counter() - begin < 5
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


def test_calibration_is_sensible_and_cached() -> None:
    line = calibrate()
    assert 1e8 < line.flops_per_second < 1e15
    assert 1e8 < line.bytes_per_second < 1e13
    assert 0 < line.overhead_seconds < 1e-2
    assert calibrate() is line


def test_executor_overheads() -> None:
    found = executor_overheads()
    assert 0 < found.record_seconds < 1e-2
    assert 0 < found.replay_seconds < 1e-2
    assert executor_overheads() is found


def test_in_place_operations_start_from_fresh_inputs() -> None:
    # run after run on its own result it would reach denormals and zero
    spec = OpSpec(aten.mul_.Scalar, (spec_of(100), 1e-30))
    from lowtide.trace.costs import Bench

    bench = Bench()
    seen: list[float] = []
    run = bench._run_cpu

    def watched(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(float(args[0][0]))
        return run(func, args, kwargs)

    bench._run_cpu = watched  # type: ignore[method-assign]
    bench.time(spec, 0.001)
    assert len(seen) >= 3
    assert set(seen) == {seen[0]}
    assert tree_map(type, seen[0]) is float
