"""Descriptions of calls, and what one run of them costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.meter import available
from lowtide.trace.costs.specs import OpCost, OpSpec, TensorSpec
from lowtide.trace.costs.timing import measure_costs

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
