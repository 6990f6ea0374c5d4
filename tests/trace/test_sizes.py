"""What other sizes of a call, or parts of it, say about its cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lowtide.trace.costs import Bench, measure_costs
from lowtide.trace.roofline import Roofline
from lowtide.trace.sizes import family_of, parts, read_off, scratch_of, work_of
from lowtide.trace.specs import OpCost, OpSpec, TensorSpec, flops

aten = torch.ops.aten
LINE = Roofline(1e10, 1e10, 1e-6)


def spec_of(
    *shape: int, key: int = 0, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None
) -> TensorSpec:
    strides = stride or torch.empty(shape, device="meta").stride()
    return TensorSpec(math.prod(shape) * dtype.itemsize, dtype, shape, strides, 0, torch.device("cpu"), key)


def product(rows: int, inner: int, columns: int) -> OpSpec:
    return OpSpec(
        aten.mm.default,
        (spec_of(rows, inner), spec_of(inner, columns, key=1)),
        output_bytes=4 * rows * columns,
    )


def cost(seconds: float, size: int, scratch: int = 0, count: int = 0) -> OpCost:
    return OpCost(seconds, scratch, "measured", "it", count, size)


def test_families_differ_in_all_but_sizes():
    same = {family_of(product(*sizes)) for sizes in ((64, 32, 16), (512, 1024, 8))}
    assert len(same) == 1
    turned = OpSpec(aten.mm.default, (spec_of(64, 32, stride=(1, 64)), spec_of(32, 16, key=1)))
    half = OpSpec(
        aten.mm.default, (spec_of(64, 32, dtype=torch.bfloat16), spec_of(32, 16, key=1, dtype=torch.bfloat16))
    )
    rows, columns = (OpSpec(aten.sum.dim_IntList, (spec_of(64, 32), [d])) for d in (0, 1))
    assert len(same | {family_of(spec) for spec in (turned, half, rows, columns)}) == 5
    assert family_of(OpSpec(torch.ops.prim.device.default, (spec_of(4),))) == ""


@pytest.mark.parametrize(
    ("known", "size", "seconds"),
    [
        ([cost(0.01, 100 << 20), cost(0.04, 400 << 20)], 200 << 20, 0.02),
        ([cost(0.01, 100 << 20)], 200 << 20, 0.02),
        ([cost(0.01, 100 << 20)], 50 << 20, 0.005),
        ([cost(0.01, 100 << 20)], 1000 << 20, None),  # too far
        ([cost(1e-5, 1 << 20)], 2 << 20, None),  # a call takes as long whatever it does
        ([cost(0.01, 100 << 20, scratch=64)], 200 << 20, None),  # scratch is not guessed
        ([cost(0.01, 100 << 20, scratch=64), cost(0.04, 400 << 20, scratch=64)], 200 << 20, 0.02),
        ([cost(0.01, 100 << 20, scratch=64), cost(0.04, 400 << 20, scratch=256)], 200 << 20, None),
        ([], 200 << 20, None),
    ],
)
def test_sizes_between_and_not_far_beyond_are_read_off(known: list[OpCost], size: int, seconds: float | None):
    found = read_off(known, 0, size)
    assert (found and found[0]) == (seconds and pytest.approx(seconds))
    if found:
        assert found[1] == known[0].scratch_bytes


def test_what_was_read_off_or_estimated_says_nothing_more():
    for source in ("interpolated", "estimated"):
        assert read_off([OpCost(0.01, 0, source, "it", 0, 100 << 20)], 0, 200 << 20) is None


def test_a_product_that_moves_bytes_says_nothing_about_one_that_computes():
    thin = cost(0.01, 64 << 20, count=1 << 30)
    assert read_off([thin], 2 << 30, 128 << 20) is not None
    assert read_off([thin], 2 << 30, 16 << 20) is None


def test_scratch_grows_in_a_straight_line_or_is_not_known():
    assert scratch_of(cost(1, 10), cost(1, 20), 100) == 0
    assert scratch_of(cost(1, 10, 64), cost(1, 20, 64), 100) == 64
    assert scratch_of(cost(1, 10, 44), cost(1, 20, 84), 100) == 404
    assert scratch_of(cost(1, 10, 64), cost(1, 10, 64), 100) is None
    assert scratch_of(cost(1, 10, 64), cost(1, 20, 32), 100) is None


def attention(batch: int, heads: int, length: int, backward: bool) -> OpSpec:
    width = 16
    stride = (length * heads * width, width, heads * width, 1)
    first = [spec_of(batch, heads, length, width, key=k, stride=stride) for k in range(5)]
    sums = spec_of(batch, heads, length, key=5, stride=(heads * length, 1, heads))
    if backward:
        return OpSpec(
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (*first, sums, 0.0, True)
        )
    return OpSpec(aten._scaled_dot_product_flash_attention_for_cpu.default, (*first[:3], 0.0, True))


HEAVY = [
    OpSpec(aten.native_dropout.default, (spec_of(8, 64, 512), 0.1, True)),
    OpSpec(aten.native_dropout_backward.default, (spec_of(8, 64, 512), spec_of(8, 64, 512, key=1,
        dtype=torch.bool), 1.1)),
    OpSpec(aten._softmax.default, (spec_of(8, 64, 512), -1, False)),
    OpSpec(aten._softmax_backward_data.default, (spec_of(1, 8, 64, 512), spec_of(1, 8, 64, 512, key=1), -1,
        torch.float32)),
    OpSpec(aten.add.Tensor, (spec_of(8, 64, 512), spec_of(512, key=1))),
    OpSpec(
        aten.native_layer_norm_backward.default,
        (*(spec_of(64, 8, 512, key=k) for k in (0, 1)), [512], *(spec_of(64, 8, 1, key=k) for k in (2, 3)),
            spec_of(512, key=4),
         spec_of(512, key=5), [True] * 3),
    ),
    attention(4, 4, 256, backward=False),
    attention(4, 4, 256, backward=True),
    product(2048, 640, 512),
    OpSpec(aten.mm.default, (spec_of(512, 2048, stride=(1, 512)), spec_of(2048, 512, key=1)),
        output_bytes=4 << 18),
]  # fmt: skip


@pytest.mark.parametrize("spec", HEAVY, ids=lambda spec: str(spec.func))
def test_parts_have_the_scratch_of_the_whole(spec: OpSpec):
    divided = parts(spec, 0.25)
    assert divided is not None
    bench = Bench()

    def run(of: OpSpec) -> OpCost:
        found = bench.time(of, 0.0, long=0.0)
        return OpCost(found.seconds, found.scratch_bytes, "measured", "it", flops(of), of.touched_bytes())

    small, larger, whole = map(run, (*divided, spec))
    assert work_of(small) < work_of(larger) < work_of(whole)
    assert scratch_of(small, larger, work_of(whole)) == whole.scratch_bytes


def test_what_has_no_parts_alike_is_not_divided():
    image, weight = spec_of(16, 16, 8, 8), spec_of(16, 16, 3, 3, key=1)
    convolution = OpSpec(
        aten.convolution.default, (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    )
    wide = OpSpec(aten.neg.default, (spec_of(1 << 20),))
    gaps = OpSpec(aten._softmax.default, (spec_of(8, 64, 512, stride=(512, 4096, 1)), -1, False))
    assert parts(convolution, 0.25) is None and parts(wide, 0.25) is None and parts(gaps, 0.25) is None


def test_another_length_runs_less(monkeypatch: pytest.MonkeyPatch):
    ran: list[int] = []
    plain = Bench.time

    def counted(self: Bench, spec: OpSpec, *args: Any, **kwargs: Any) -> OpCost:
        ran.append(spec.touched_bytes())
        found = plain(self, spec, *args, **kwargs)
        return OpCost(spec.touched_bytes() * 1e-10, found.scratch_bytes, found.source)

    monkeypatch.setattr(Bench, "time", counted)
    cache: dict[int, OpCost] = {}

    def step(length: int) -> OpCost:
        gelu = OpSpec(aten.gelu.default, (spec_of(4, length, 512),), output_bytes=8192 * length)
        return measure_costs({length: gelu}, cache=cache, time_budget=0.05, roofline=LINE)[length]

    assert step(8192).source == "scaled" and step(4096).source == "interpolated"
    assert step(8192).seconds == pytest.approx(2 * step(4096).seconds)
    assert len(ran) == 1 and ran[0] < 8192 * 8192
