"""The maps between a tensor that every rank has and one that the ranks share, each with its conjugate in
backward.

| map | forward | backward |
|---|---|---|
| `copy_to_tensor_model_parallel_region` | nothing | all-reduce |
| `reduce_from_tensor_model_parallel_region` | all-reduce | nothing |
| `scatter_to_tensor_model_parallel_region` | own piece of a dimension, the last one | all-gather |
| `gather_from_tensor_model_parallel_region` | all-gather of a dimension, the last one | own piece |
| `scatter_to_sequence_parallel_region` | own piece of the sequence | all-gather |
| `gather_from_sequence_parallel_region` | all-gather of the sequence | reduce-scatter, or own piece |
| `reduce_scatter_to_sequence_parallel_region` | reduce-scatter | all-gather |

The names are those of neuronx-distributed and Megatron-LM; the operators f, f-bar, g and g-bar are arXiv
2205.05198, section 4.2. None of them writes to its argument. Each takes ``process_group`` as
`lowtide.parallel.tensor_group` does. With one rank each is the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.errors import is_count
from lowtide.parallel.collectives import all_reduce, gather, gather_features, piece_of, reduce_scatter
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_dimension, check_dtypes, check_tensors
from lowtide.parallel.groups import TensorGroup, tensor_group


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.group, ctx.dtype).wait(), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dtype: torch.dtype | None) -> Tensor:
        return all_reduce(x, group, dtype).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class _ScatterFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dimension: int) -> Tensor:
        ctx.group, ctx.dimension = group, dimension
        return piece_of(x, group, dimension, "the last dimension" if dimension == -1 else "the dimension")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather_features(grad, ctx.group, ctx.dimension).wait(), None, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dimension: int) -> Tensor:
        ctx.group, ctx.dimension = group, dimension
        return gather_features(x, group, dimension).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return piece_of(grad, ctx.group, ctx.dimension), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dimension: int) -> Tensor:
        ctx.group, ctx.dimension = group, dimension
        return piece_of(x, group, dimension, "the sequence")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, ctx.group, ctx.dimension).wait(), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: TensorGroup,
        dimension: int,
        to_model_parallel: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.group, ctx.dimension, ctx.to_model_parallel, ctx.dtype = (
            group,
            dimension,
            to_model_parallel,
            dtype,
        )
        return gather(x, group, dimension).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.to_model_parallel:
            piece = reduce_scatter(grad, ctx.group, ctx.dimension, ctx.dtype).wait()
        else:
            piece = piece_of(grad, ctx.group, ctx.dimension)
        return piece, None, None, None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, dimension: int, dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dimension = group, dimension
        return reduce_scatter(x, group, dimension, dtype).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, ctx.group, ctx.dimension).wait(), None, None, None


def copy_to_tensor_model_parallel_region(
    input_: Tensor, process_group: Any = None, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Enter a tensor-parallel region: the same tensor in forward, the sum of the ranks' gradients in backward
    (f in the paper).

    Args:
        input_: any shape, equal on every rank.
        process_group: see `lowtide.parallel.tensor_group`.
        reduce_dtype: make the sum in this dtype if it is wider than the gradient's.
    """
    check_tensors("copy_to_tensor_model_parallel_region", input_=input_)
    check_dtypes("copy_to_tensor_model_parallel_region", reduce_dtype=reduce_dtype)
    group = tensor_group(process_group)
    return input_ if group.size == 1 else _Copy.apply(input_, group, reduce_dtype)  # type: ignore


def reduce_from_tensor_model_parallel_region(
    input_: Tensor, process_group: Any = None, *, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Leave a tensor-parallel region: the sum of the ranks' tensors in forward, the same gradient in backward
    (f-bar).
    """
    check_tensors("reduce_from_tensor_model_parallel_region", input_=input_)
    check_dtypes("reduce_from_tensor_model_parallel_region", reduce_dtype=reduce_dtype)
    group = tensor_group(process_group)
    return input_ if group.size == 1 else _Reduce.apply(input_, group, reduce_dtype)  # type: ignore


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, process_group: Any = None, *, dimension: int = -1
) -> Tensor:
    """This rank's piece of a dimension; all-gather in backward.

    Args:
        input_: any shape, equal on every rank.
        process_group: see `lowtide.parallel.tensor_group`.
        dimension: which one; -3 is the channels of an image.

    Raises:
        ParallelError: the dimension does not divide, or there is none.
    """
    check_tensors("scatter_to_tensor_model_parallel_region", input_=input_)
    check_dimension("scatter_to_tensor_model_parallel_region", input_, dimension)
    group = tensor_group(process_group)
    return input_ if group.size == 1 else _ScatterFeatures.apply(input_, group, dimension)  # type: ignore


def gather_from_tensor_model_parallel_region(
    input_: Tensor, process_group: Any = None, *, dimension: int = -1
) -> Tensor:
    """The ranks' tensors side by side along a dimension; this rank's piece of the gradient in backward.

    Args:
        input_: any shape, the same on every rank.
        process_group: see `lowtide.parallel.tensor_group`.
        dimension: which one; -3 is the channels of an image.

    Raises:
        ParallelError: there is no such dimension.
    """
    check_tensors("gather_from_tensor_model_parallel_region", input_=input_)
    check_dimension("gather_from_tensor_model_parallel_region", input_, dimension)
    group = tensor_group(process_group)
    return input_ if group.size == 1 else _GatherFeatures.apply(input_, group, dimension)  # type: ignore


def scatter_to_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, process_group: Any = None
) -> Tensor:
    """This rank's shard of the sequence; all-gather in backward.

    Raises:
        ParallelError: the sequence does not divide, or the dimension is neither 0 nor 1.

    >>> scatter_to_sequence_parallel_region(torch.ones(4, 2)).shape
    torch.Size([4, 2])
    """
    check_tensors("scatter_to_sequence_parallel_region", input_=input_)
    group, dimension = tensor_group(process_group), check_sequence_dimension(sequence_dimension)
    return input_ if group.size == 1 else _ScatterSequence.apply(input_, group, dimension)  # type: ignore


def gather_from_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: Any = None,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """The whole sequence on every rank (g in the paper).

    Args:
        input_: this rank's shard of the sequence.
        sequence_dimension: 0 or 1.
        to_model_parallel: what follows is tensor parallel, so the ranks' gradients are parts of a sum and
            backward reduce-scatters them. Without it what follows is the same on every rank, and backward
            takes this rank's piece.
        process_group: see `lowtide.parallel.tensor_group`.
        reduce_dtype: make the sum in this dtype if it is wider than the gradient's.
    """
    check_tensors("gather_from_sequence_parallel_region", input_=input_)
    check_dtypes("gather_from_sequence_parallel_region", reduce_dtype=reduce_dtype)
    group, dimension = tensor_group(process_group), check_sequence_dimension(sequence_dimension)
    if group.size == 1:
        return input_
    return _GatherSequence.apply(input_, group, dimension, to_model_parallel, reduce_dtype)  # type: ignore


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    process_group: Any = None,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's piece of the sum of the ranks' sequences; all-gather in backward (g-bar).

    Raises:
        ParallelError: the sequence does not divide, or the dimension is neither 0 nor 1.
    """
    check_tensors("reduce_scatter_to_sequence_parallel_region", input_=input_)
    check_dtypes("reduce_scatter_to_sequence_parallel_region", reduce_dtype=reduce_dtype)
    group, dimension = tensor_group(process_group), check_sequence_dimension(sequence_dimension)
    if group.size == 1:
        return input_
    return _ReduceScatterSequence.apply(input_, group, dimension, reduce_dtype)  # type: ignore[return-value]


def check_sequence_dimension(dimension: int) -> int:
    """The dimension itself.

    Raises:
        ParallelError: it is neither 0, for (sequence, batch, features), nor 1, for (batch, sequence,
            features).
    """
    if not is_count(dimension) or dimension > 1:
        raise ParallelError(
            f"sequence_dimension={dimension!r}: use 0 for tensors of shape (sequence, batch, features), 1 "
            "for (batch, sequence, features)"
        )
    return dimension
