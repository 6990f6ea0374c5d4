"""Output layers of `lowtide.parallel`, whose vocabulary the ranks share: their logits in pieces.

In: a column-parallel layer. Out: the product that makes its logits, and the cross entropy of logits of which
each rank has its part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowtide.extensions.tiles.products import Pieces, Product, Products, spans
from lowtide.parallel.collectives import gather_features
from lowtide.parallel.layers import ColumnParallelLinear
from lowtide.parallel.loss import Vocabulary
from lowtide.parallel.region import RegionColumnLinear, enter_region


class _Gathered:
    """A layer that gives every rank all logits: of a piece they are gathered, and a rank's part of a piece's
    gradient needs no transfer.
    """

    def __init__(self, layer: ColumnParallelLinear) -> None:
        self.layer = layer
        self.width = layer.output_size
        self.own_rows = layer.partitions["weight"].valid

    def gathered(self, own: Tensor) -> Tensor:
        """The logits of all ranks."""
        missing = self.layer.weight.shape[0] - own.shape[-1]
        whole = gather_features(F.pad(own, (0, missing)) if missing else own, self.layer.group).wait()
        return whole[..., : self.width].contiguous()

    def own(self, gradient: Tensor) -> Tensor:
        """This rank's columns."""
        begin = self.layer.group.rank * self.layer.weight.shape[0]
        return gradient[:, begin : begin + self.own_rows]

    def whole(self, hidden: Tensor) -> Tensor:
        """The logits, with their history; ``hidden`` is inside the layer's region."""
        weight, bias = self.layer._operands()
        return self.layer._finish(F.linear(hidden, weight.to(hidden.dtype), bias))


def product_of(layer: Any, region: Any, hidden: Tensor, dtype: torch.dtype) -> Product | None:
    """The product of a column-parallel layer, or ``None`` where its output is no tensor.

    Args:
        layer: the layer.
        region: the `lowtide.parallel.parallelize.Region` that is the layer's forward, if it is one.
        hidden: what it is called with.
        dtype: of the product.
    """
    if layer.skip_bias_add:
        return None
    if region is not None:
        hidden = enter_region(hidden, region.group, region.dimension, region.reduce_dtype)
    elif not isinstance(layer, RegionColumnLinear):
        dimension = layer.sequence_dimension if layer.sequence_parallel_enabled else None
        reduced = layer.reduce_dtype or dtype
        hidden = enter_region(hidden, layer.group, dimension, reduced)
    shared = _Gathered(layer) if layer.gather_output and layer.group.size > 1 else None
    return Product(hidden, layer.weight, layer.bias, dtype, shared=shared)


class _RowLosses(torch.autograd.Function):
    """The cross entropy of each row, of logits of which each rank has its part."""

    @staticmethod
    def forward(
        ctx: Any, products: Products, labels: Tensor, part: Vocabulary, length: int, *tensors: Tensor
    ) -> Tensor:
        work = Pieces(products.given(tensors), [False] * len(tensors))
        losses = torch.empty(labels.shape, dtype=products.dtype, device=labels.device)
        totals = torch.empty_like(losses)
        with torch.autocast(labels.device.type, enabled=False):
            for rows in spans(labels.shape[0], length):
                values = work.piece(rows)[0][:, : part.valid]
                losses[rows], totals[rows] = part.losses(values, labels[rows])
        ctx.products, ctx.part, ctx.length = products, part, length
        ctx.save_for_backward(labels, totals, *tensors)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        labels, totals, *tensors = ctx.saved_tensors
        part: Vocabulary = ctx.part
        work = Pieces(ctx.products.given(tensors), ctx.needs_input_grad[4:])
        with torch.autocast(labels.device.type, enabled=False):
            for rows in spans(labels.shape[0], ctx.length):
                values, tape = work.piece(rows)
                part.gradient_(values[:, : part.valid], labels[rows], totals[rows], grad[rows])
                values[:, part.valid :] = 0
                work.take(rows, tape, values)
        return (None, None, None, None, *work.results(tensors))


def row_losses(products: Products, target: Tensor, part: Vocabulary, length: int) -> Tensor:
    """As `lowtide.parallel.parallel_cross_entropy`, of logits that are not there."""
    wide = products.widened()
    given = (wide.without_tensors(), target.reshape(-1), part, length, *wide.tensors())
    return _RowLosses.apply(*given).view(target.shape)  # type: ignore[union-attr]
