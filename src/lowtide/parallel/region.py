"""Tensor-parallel regions in models that were written for one process: enter with one transfer, and let the
layers inside share it.

In such a model q, k and v are three modules that are called with the same tensor, from code that also looks
at that tensor's shape. So the tensor is gathered once in front of that code (`enter_region`), and remembers
the shard it came from. A column-parallel layer called with it saves the shard, not the whole; in backward the
first of the layers starts the gather again, beside its product for the input's gradient, and the others find
it done.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowtide.interception import is_evicted
from lowtide.parallel.collectives import Pending, gather, reduce_scatter
from lowtide.parallel.errors import ParallelWarning
from lowtide.parallel.groups import TensorGroup
from lowtide.parallel.layers import ColumnParallelLinear, SharedHeadsLinear
from lowtide.parallel.linear import flat_rows
from lowtide.parallel.mappings import copy_to_tensor_model_parallel_region


class Source:
    """Where a gathered tensor came from, for the layers that save it.

    Args:
        group, dimension: how it was gathered.
    """

    def __init__(self, group: TensorGroup, dimension: int) -> None:
        self.group = group
        self.dimension = dimension
        self.readers = 0
        self._waiting = 0
        self._gathered: Pending | Tensor | None = None

    def start(self, shard: Tensor) -> None:
        """One of the layers that saved the shard begins its backward."""
        if self._gathered is None:
            self._gathered = gather(shard, self.group, self.dimension)
            self._waiting = self.readers

    def take(self) -> Tensor:
        """The whole again; it is let go with the last of the layers."""
        assert self._gathered is not None
        if isinstance(self._gathered, Pending):
            self._gathered = self._gathered.wait()
        whole = self._gathered
        self._waiting -= 1
        if self._waiting <= 0:
            self._gathered = None
        return whole


class _Enter(torch.autograd.Function):
    """The whole sequence; its gradients, parts of a sum, are reduce-scattered in one go."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dimension: int, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dimension, ctx.dtype = group, dimension, dtype
        return gather(x, group, dimension).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter(grad, ctx.group, ctx.dimension, ctx.dtype).wait(), None, None, None


def enter_region(
    x: Tensor, group: TensorGroup, sequence_dimension: int | None, reduce_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The input of a tensor-parallel region, the same on every rank.

    Args:
        x: this rank's piece of the sequence, or with ``sequence_dimension=None`` the same tensor on every
            rank.
        group: the ranks.
        sequence_dimension: 0 or 1.
        reduce_dtype: sum the gradient in this dtype where it is wider.
    """
    if group.size == 1:
        return x
    if torch.is_autocast_enabled(x.device.type):
        # what the layers inside would do, at half the bytes that travel
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if sequence_dimension is None:
        return copy_to_tensor_model_parallel_region(x, group, reduce_dtype=reduce_dtype)
    whole: Any = _Enter.apply(x, group, sequence_dimension, reduce_dtype)
    whole.lowtide_source = Source(group, sequence_dimension)
    whole.lowtide_shard = x  # lives as long as the tensor that a layer may still be called with
    return whole


class _RegionLinear(torch.autograd.Function):
    """y = x w^T + b for a gathered x, of which only the shard is saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shard: Tensor, weight: Tensor, bias: Tensor | None, source: Source
    ) -> Tensor:
        ctx.source = source
        ctx.whole_saved = not torch.compiler.is_compiling() and is_evicted(x)
        trained = ctx.needs_input_grad[2]
        if trained and not ctx.whole_saved:
            source.readers += 1
        ctx.save_for_backward((x if ctx.whole_saved else shard) if trained else None, weight)
        d = source.dimension
        return F.linear(x.movedim(d, 0), weight, bias).movedim(0, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved, weight = ctx.saved_tensors
        source: Source = ctx.source
        d = source.dimension
        if saved is not None and not ctx.whole_saved:
            source.start(saved)
        rows = flat_rows(grad, d)
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = (rows @ weight).view(*grad.movedim(d, 0).shape[:-1], weight.shape[1]).movedim(0, d)
        grad_weight = None
        if saved is not None:
            grad_weight = rows.t() @ flat_rows(saved if ctx.whole_saved else source.take(), d)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[3] else None
        return grad_input, None, grad_weight, grad_bias, None


def region_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sequence_dimension: int | None) -> Tensor:
    """The product inside a region: nothing travels in forward.

    A tensor that the model made of the gathered one (``x * scale``, ``x.to(...)``, a view) has forgotten its
    shard, so all of it is saved for backward: right, and t times the memory. That is said once for each
    place.
    """
    source: Source | None = getattr(x, "lowtide_source", None)
    if source is None:
        if sequence_dimension is not None:
            warnings.warn(
                "a column-parallel layer inside a sequence-parallel region was called with a tensor of "
                f"shape {tuple(x.shape)} that is not the gathered input itself but made of it (by a dtype or "
                "layout change, say): the whole sequence is saved for backward instead of this rank's "
                "piece. Apply such operations in front of the module that holds the layer",
                ParallelWarning,
                stacklevel=2,
            )
        return F.linear(x, weight, bias)
    shard: Tensor = x.lowtide_shard.detach()  # type: ignore[attr-defined]
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return _RegionLinear.apply(x, shard, weight, bias, source)  # type: ignore[return-value]


class RegionColumnLinear(ColumnParallelLinear):
    """A column-parallel layer inside a region that was entered with `enter_region`.

    Attributes:
        region_dimension: along which the region's input was gathered, or ``None`` where it was not.
    """

    region_dimension: int | None = None

    def forward(self, input: Tensor) -> Any:
        """The product; it lies in memory as a model for one process expects."""
        weight, bias = self._operands()
        return self._finish(region_linear(input, weight, bias, self.region_dimension)).contiguous()


class RegionHeadsLinear(SharedHeadsLinear):
    """Keys or values of fewer heads than ranks, inside a region that was entered with `enter_region`.

    Attributes:
        region_dimension: as in `RegionColumnLinear`.
    """

    region_dimension: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """The product for this rank's head."""
        weight, bias = self._operands()
        return region_linear(input, weight, bias, self.region_dimension).contiguous()
