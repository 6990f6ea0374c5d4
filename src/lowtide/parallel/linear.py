"""The products behind `ColumnParallelLinear`: what is saved, what travels, and what travels beside which
product.

Under sequence parallelism the input is a shard of the sequence. Forward gathers it and multiplies; **only the
shard is saved**. Backward gathers it once more, beside the product that gives the input's gradient; that
gradient is then reduce-scattered beside the product that gives the weight's (arXiv 2205.05198, section 4.2.2:
"we store only Y_i^s ... and perform an extra all-gather in the backward pass"). A weight that is not trained
needs no input, so nothing is saved for it and nothing gathered.

Several linear layers that read the same input (q, k and v; gate and up) share one gather in each direction
and one reduce-scatter.

Inside a recomputing scope the gathered input comes back with the recomputation that the layers after this one
ask for, so it is "saved" instead of the shard: at no cost, and the gather is not done again for the weight's
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowtide.interception import is_evicted
from lowtide.parallel.collectives import Pending, all_reduce, gather, reduce_scatter
from lowtide.parallel.groups import TensorGroup


class _ColumnLinears(torch.autograd.Function):
    """y_k = gather(x) w_k^T + b_k for several weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: TensorGroup,
        dimension: int | None,
        reduce_dtype: torch.dtype | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.group, ctx.dimension, ctx.reduce_dtype = group, dimension, reduce_dtype
        whole = x if dimension is None else gather(x, group, dimension).wait()
        compiling = torch.compiler.is_compiling()  # then Dynamo may not enter the call
        ctx.whole_saved = dimension is None or (not compiling and is_evicted(whole))
        trained = any(ctx.needs_input_grad[4 : 4 + len(weights)])
        ctx.save_for_backward((whole if ctx.whole_saved else x) if trained else None, *weights)
        return _products(whole, dimension, weights, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved, *weights = ctx.saved_tensors
        group, dimension = ctx.group, ctx.dimension
        count = len(weights)
        needs_input, needs_weights, needs_biases = (
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[4 : 4 + count],
            ctx.needs_input_grad[4 + count :],
        )
        gathering: Pending | None = None
        if saved is not None:
            gathering = Pending(saved, running=False) if ctx.whole_saved else gather(saved, group, dimension)
        rows = [flat_rows(g, dimension) for g in grads]
        reducing: Pending | None = None
        if needs_input:
            grad_input = _input_gradient(rows, weights)
            grad_input = grad_input.view(*_leading(grads[0], dimension), grad_input.shape[-1])
            if dimension is None:
                reducing = all_reduce(grad_input, group, ctx.reduce_dtype, in_place=True)
            else:
                reducing = reduce_scatter(
                    grad_input.movedim(0, dimension), group, dimension, ctx.reduce_dtype
                )
            del grad_input
        weight_grads: list[Tensor | None] = [None] * count
        if gathering is not None:
            weight_grads = _weight_gradients(rows, flat_rows(gathering.wait(), dimension), needs_weights)
        bias_grads = [g.sum(0) if needed else None for g, needed in zip(rows, needs_biases, strict=True)]
        return (None if reducing is None else reducing.wait(), None, None, None, *weight_grads, *bias_grads)


def column_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: TensorGroup,
    *,
    sequence_dimension: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The products of one input with several column-parallel weights.

    Args:
        x: (..., in). With ``sequence_dimension`` this rank's piece of the sequence, else the same on every
            rank.
        weights: each (out_k, in), this rank's rows of the whole weight.
        biases: each (out_k) or ``None``.
        group: the ranks.
        sequence_dimension: 0 or 1, or ``None`` where the input is not sharded.
        reduce_dtype: sum the input's gradient in this dtype where it is wider.

    Returns:
        For each weight the product over the whole sequence, (..., out_k). With ``sequence_dimension=1`` it
        lies in memory with the sequence outermost; use ``reshape`` rather than ``view`` to fold it.
    """
    if group.size == 1:
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        weights = [weight.to(dtype) for weight in weights]
        biases = [None if bias is None else bias.to(dtype) for bias in biases]
    with torch.autocast(device, enabled=False):
        if not torch.is_grad_enabled():  # Dynamo may leave out the context of a function without gradients
            whole = x if sequence_dimension is None else gather(x, group, sequence_dimension).wait()
            return _products(whole, sequence_dimension, weights, biases)
        given = (x, group, sequence_dimension, reduce_dtype, *weights, *biases)
        return _ColumnLinears.apply(*given)  # type: ignore[return-value]


def _products(
    whole: Tensor, dimension: int | None, weights: Sequence[Any], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The products of the whole input with each weight, in memory with the sequence outermost where that is
    sharded along ``dimension``.
    """
    rows = whole if dimension is None else whole.movedim(dimension, 0)
    outputs = (F.linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return tuple(y if dimension is None else y.movedim(0, dimension) for y in outputs)


def flat_rows(x: Tensor, dimension: int | None) -> Tensor:
    """(tokens, features), with the sequence outermost where it is sharded: a view of what a gather leaves."""
    x = x if dimension is None else x.movedim(dimension, 0)
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)


def _leading(x: Tensor, dimension: int | None) -> torch.Size:
    return (x if dimension is None else x.movedim(dimension, 0)).shape[:-1]


def _weight_gradients(grads: Sequence[Tensor], inputs: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradient of each weight that needs one; what is gathered goes with this call."""
    return [g.t() @ inputs if wanted else None for g, wanted in zip(grads, needed, strict=True)]


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of the products of each output's gradient with its weight."""
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(grad, weight)
    return total
