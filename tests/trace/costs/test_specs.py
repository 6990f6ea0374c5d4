"""Calls that are made up from their description have valid inputs, laid out as the step's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_specs import CPU, aten, one, spec_of

from lowtide.trace.costs import timing
from lowtide.trace.costs.roofline import Roofline
from lowtide.trace.costs.specs import OpSpec, TensorSpec, likely_flops
from lowtide.trace.costs.timing import Bench, estimate


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
    rows = spec_of(3, dtype=torch.int64, key=1)
    assert one(OpSpec(aten.index.Tensor, (spec_of(1, 8), [rows]))).source == "measured"


def test_lengths_are_one() -> None:
    lengths = spec_of(5, dtype=torch.int64)
    args = (torch.zeros(5, dtype=torch.int64),)
    spec = OpSpec(aten.repeat_interleave.Tensor, (lengths,))
    timing._fit(spec, args)
    assert args[0].tolist() == [1] * 5 and one(spec).source == "measured"


def test_an_operation_without_a_formula_is_taken_for_the_product_that_its_sizes_make() -> None:
    rows, inner, width, groups = 96, 40, 24, 4
    product = 2 * rows * inner * width
    with torch.library._scoped_library("lowtide_costs_test", "DEF") as library:
        library.define("product(Tensor x, Tensor y) -> Tensor")
        library.define("back(Tensor x, Tensor y, Tensor g) -> (Tensor, Tensor)")
        library.define("whole(Tensor x) -> Tensor")
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("product", lambda x, y: x.new_empty(*x.shape[:-1], y.shape[-1]), "Meta")
        library.impl("back", lambda x, y, g: (torch.empty_like(x), torch.empty_like(y)), "Meta")
        library.impl("whole", torch.empty_like, "Meta")
        ops = torch.ops.lowtide_costs_test

        def taken(op: Any, *shapes: tuple[int, ...]) -> int:
            return likely_flops(OpSpec(op, tuple(spec_of(*one, key=at) for at, one in enumerate(shapes))))

        assert taken(ops.product.default, (rows, inner), (inner, width)) == product
        assert taken(ops.product.default, (8, rows, inner), (8, inner, width)) == 8 * product
        grouped = (rows, inner), (groups, inner, width)
        assert taken(ops.product.default, *grouped) == product
        assert taken(ops.back.default, *grouped, (rows, width)) == 2 * product
        assert taken(ops.whole.default, (rows, inner)) == 2 * rows * inner
        assert taken(ops.unknown.default, (rows, inner)) == 0
        line = Roofline(1e9, 1e12, 0.0)
        spec = OpSpec(ops.product.default, (spec_of(rows, inner), spec_of(inner, width, key=1)))
        assert estimate(spec, line).seconds == pytest.approx(product / 1e9)
    assert likely_flops(OpSpec(aten.neg.default, (spec_of(rows, inner),))) == 0
