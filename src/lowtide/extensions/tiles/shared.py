"""Output layers of `lowtide.parallel`, whose vocabulary the ranks share: their logits in pieces.

In: a column-parallel layer. Out: the product that makes its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.extensions.tiles.products import Product, Term
from lowtide.parallel.collectives import gather_features
from lowtide.parallel.layers import ColumnParallelLinear
from lowtide.parallel.region import RegionColumnLinear, enter_region


class _GatheredTerm(Term):
    """Of a piece the logits of all ranks are gathered; a rank's part of its gradient needs no transfer."""

    def __init__(self, layer: ColumnParallelLinear, product: Product, needs: Sequence[bool]) -> None:
        super().__init__(product, needs, layer.partitions["weight"].valid)
        self.layer = layer

    def logits(self, rows: slice) -> Tensor:
        own = F.linear(self.inputs(rows), self.weight)
        missing = self.layer.weight.shape[0] - own.shape[-1]
        whole = gather_features(F.pad(own, (0, missing)) if missing else own, self.layer.group).wait()
        whole = whole[..., : self.layer.output_size].contiguous()
        return whole if self.bias is None else whole.add_(self.bias)

    def own(self, gradient: Tensor) -> Tensor:
        begin = self.layer.group.rank * self.layer.weight.shape[0]
        return gradient[:, begin : begin + self.own_rows]


class _Gathered:
    """A layer that gives every rank all logits."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        self.layer, self.width = layer, layer.output_size

    def term(self, product: Product, needs: Sequence[bool]) -> Term:
        """The product, row by row."""
        return _GatheredTerm(self.layer, product, needs)

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
