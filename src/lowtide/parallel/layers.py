"""`ColumnParallelLinear` and `RowParallelLinear`: a linear layer whose weight the ranks share.

A column-parallel layer holds some rows of the weight (columns of A in Y = XA) and gives some features of the
output; a row-parallel layer takes some features of the input and sums over the ranks. One after the other
they need a single sum: between them nothing travels. Parameters, their order and their defaults are
neuronx-distributed's, where they mean something off Trainium.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.errors import expect
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_counts, check_input
from lowtide.parallel.linear import column_linears
from lowtide.parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from lowtide.parallel.module import InitMethod, ParallelLinear
from lowtide.parallel.partition import partition, replicated


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose output features are split among the ranks.

    Args:
        input_size: features in.
        output_size: features out, of the whole layer.
        bias: add a bias. With ``gather_output`` every rank holds all of it, else its part.
        gather_output: give every rank all features instead of its own. Needs
            ``sequence_parallel_enabled=False``.
        dtype, device: of the parameters.
        stride: the weight is that many blocks one above the other (3 for q, k and v), each cut on its own.
        init_method: fills the whole weight in place; ``None`` is what ``nn.Linear`` does.
        sequence_parallel_enabled: the input is this rank's shard of the sequence, and is gathered.
        sequence_dimension: 0 (the default then) for (sequence, batch, features), or 1 for (batch, sequence,
            features).
        keep_master_weight: keep the whole initial weight as ``master_weight``.
        skip_bias_add: return (output, bias) and leave the addition to the caller.
        pad: make ``output_size`` divide by zero rows, which are never trained. With ``stride`` each block
            gets its own.
        pad_alignment_size_per_rank: pad until the features of each rank are a multiple of this. Needs
            ``pad``.
        keep_padded_output: the gathered output keeps the padding, as zeros behind the features. Without
            ``gather_output`` the output always has the rank's padding.
        tensor_model_parallel_group: see `lowtide.parallel.tensor_group`.
        reduce_dtype: the input's gradient is summed over the ranks in this dtype if it is wider than the
            gradient's.

    Shapes:
        in: (..., input_size); under sequence parallelism (sequence / t, batch, input_size) or (batch,
            sequence / t, input_size).
        out: (..., output_size / t), or (..., output_size) with ``gather_output``; the whole sequence. With
            ``pad``, ``output_size`` is padded up to a multiple of t * ``pad_alignment_size_per_rank``.

    Raises:
        ParallelError: a size does not divide, or options exclude each other.

    Example:
        >>> layer = ColumnParallelLinear(8, 16, gather_output=False)
        >>> layer(torch.randn(5, 2, 8)).shape
        torch.Size([5, 2, 16])

    Source: arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            tensor_model_parallel_group,
            input_size,
            output_size,
            dtype,
            sequence_parallel_enabled,
            sequence_dimension,
            reduce_dtype,
        )
        if gather_output and sequence_parallel_enabled:
            raise ParallelError(
                "gather_output=True with sequence_parallel_enabled=True would give every rank all features "
                "of the whole sequence: pass gather_output=False, and gather afterwards "
                "(gather_from_tensor_model_parallel_region) if that is what is wanted"
            )
        self.gather_output = gather_output
        self.keep_padded_output = keep_padded_output
        self.skip_bias_add = skip_bias_add
        cut: dict[str, Any] = {"stride": stride, "pad": pad, "what": "output_size"}
        cut["alignment"] = pad_alignment_size_per_rank
        where = partition((output_size, input_size), 0, self.group, **cut)
        if gather_output and stride > 1 and not where.is_whole:
            raise ParallelError(
                f"gather_output=True with stride={stride} would return the blocks interleaved by rank, or "
                "with padding between them: pass gather_output=False"
            )
        if gather_output:
            bias_where = replicated((output_size,), self.group)
        else:
            bias_where = partition((output_size,), 0, self.group, **cut)
        self._make(where, bias_where if bias else None, init_method, keep_master_weight, device)

    @property
    def output_size_per_partition(self) -> int:
        """Features of this rank, padding included."""
        return self.weight.shape[0]

    def forward(self, input: Tensor) -> Any:
        """The product; with ``skip_bias_add`` a pair of product and bias."""
        return column_parallel(input, (self,))[0]

    def _operands(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the product, without a bias that is added later."""
        return self.weight, None if self.skip_bias_add or self._gathers else self.bias

    @property
    def _gathers(self) -> bool:
        """Whether the output is not what this rank computes."""
        return self.gather_output and not self.partitions["weight"].is_whole

    def _finish(self, output: Tensor) -> Any:
        """From the product to what `forward` returns. No gradient reaches the padding."""
        where, bias = self.partitions["weight"], self.bias
        if not self._gathers:
            output = where.blank(output, -1)
        else:
            output = gather_from_tensor_model_parallel_region(output, self.group)[..., : self.output_size]
            if bias is not None and not self.skip_bias_add:
                output = output + bias
            if self.keep_padded_output:
                padding = (0, where.padded - self.output_size)
                output, bias = F.pad(output, padding), None if bias is None else F.pad(bias, padding)
        return (output, bias) if self.skip_bias_add else output


class SharedHeadsLinear(ParallelLinear):
    """A linear layer for the keys or values of fewer heads than ranks: several ranks need the same head.

    Every rank holds the whole (small) weight and uses the rows of its head. Its gradient on one rank is a
    part of a sum over all of them, and marked so.

    Args:
        input_size: features in.
        heads: how many there are; a divisor of the number of ranks.
        head_width: features of each.
        bias: add one.
        dtype, device, init_method, sequence_parallel_enabled, sequence_dimension,
            tensor_model_parallel_group, reduce_dtype: as in `ColumnParallelLinear`.

    Shapes:
        in: as `ColumnParallelLinear`.
        out: (..., head_width), of head ``rank * heads // t``.

    Raises:
        ParallelError: ``heads`` does not divide the number of ranks.
    """

    def __init__(
        self,
        input_size: int,
        heads: int,
        head_width: int,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_counts(type(self).__name__, 1, heads=heads, head_width=head_width)
        super().__init__(
            tensor_model_parallel_group,
            input_size,
            heads * head_width,
            dtype,
            sequence_parallel_enabled,
            sequence_dimension,
            reduce_dtype,
        )
        if self.group.size % heads:
            raise ParallelError(
                f"{heads} key-value heads on {self.group.size} ranks: one number must divide the other, so "
                "that every rank has whole heads"
            )
        start = self.group.rank * heads // self.group.size * head_width
        self.rows = slice(start, start + head_width)
        if self.group.size > 1:
            self.partial = ("weight", "bias") if bias else ("weight",)
        where = replicated((self.output_size, input_size), self.group)
        self._make(
            where,
            replicated((self.output_size,), self.group) if bias else None,
            init_method,
            False,
            device,
        )

    def forward(self, input: Tensor) -> Tensor:
        """The product for this rank's head."""
        return column_parallel(input, (self,))[0]

    def _operands(self) -> tuple[Tensor, Tensor | None]:
        return self.weight[self.rows], None if self.bias is None else self.bias[self.rows]

    def _finish(self, output: Tensor) -> Tensor:
        return output


def column_parallel(
    input: Tensor, layers: Sequence[ColumnParallelLinear | SharedHeadsLinear]
) -> tuple[Any, ...]:
    """The outputs of several column-parallel layers for one input, which is gathered once for all of them.

    Args:
        input: the input of each layer.
        layers: layers with the same group, sequence parallelism and ``reduce_dtype``.

    Returns:
        The output of each layer.

    Raises:
        ParallelError: the layers do not agree, or do not take such an input.

    >>> q, k = (ColumnParallelLinear(8, n, gather_output=False) for n in (8, 4))
    >>> [tuple(y.shape) for y in column_parallel(torch.randn(3, 2, 8), (q, k))]
    [(3, 2, 8), (3, 2, 4)]
    """
    kinds = ColumnParallelLinear | SharedHeadsLinear
    several = isinstance(layers, Sequence | nn.ModuleList) and len(layers) > 0
    fits = several and all(isinstance(layer, kinds) for layer in layers)
    if not fits:  # Dynamo may not trace what raises
        expect(fits, "column_parallel(layers=)", layers, "a list of column-parallel layers", ParallelError)
    for layer in layers:
        check_input(layer, input, layer.input_size)
    first = layers[0]
    kind = (first.group, first.sequence_dimension, first.reduce_dtype)
    if any((layer.group, layer.sequence_dimension, layer.reduce_dtype) != kind for layer in layers):
        raise ParallelError(
            "column_parallel: the layers differ in group, sequence_dimension or reduce_dtype, so they "
            "cannot share a gather"
        )
    for layer in layers:
        layer.mark_shared()
    operands = [layer._operands() for layer in layers]
    outputs = column_linears(
        input,
        [weight for weight, _ in operands],
        [bias for _, bias in operands],
        first.group,
        sequence_dimension=first.sequence_dimension,
        reduce_dtype=first.reduce_dtype,
    )
    return tuple(layer._finish(output) for layer, output in zip(layers, outputs, strict=True))


class RowParallelLinear(ParallelLinear):
    """A linear layer whose input features are split among the ranks; outputs are summed over the ranks.

    Args:
        input_size: features in, of the whole layer.
        output_size: features out.
        bias: add one, after the sum; every rank has all of it. Under sequence parallelism its gradient on one
            rank is a part of a sum.
        input_is_parallel: the input is this rank's features already, as a column-parallel layer leaves them;
            else it is cut first.
        dtype, device: of the parameters.
        stride: the input is that many blocks side by side, each cut on its own.
        init_method: fills the whole weight in place; ``None`` is what ``nn.Linear`` does.
        sequence_parallel_enabled: give each rank its shard of the sequence, by a reduce-scatter in place of
            the all-reduce. Needs ``input_is_parallel=True`` and ``reduce_output=True``.
        sequence_dimension: 0 (the default then) or 1.
        keep_master_weight: keep the whole initial weight as ``master_weight``.
        skip_bias_add: return (output, bias) and leave the addition to the caller.
        pad: make ``input_size`` divide by zero columns, which are never trained. The input of a rank is
            padded then.
        reduce_output: without it the output is this rank's part of the sum, and a bias must be left to the
            caller.
        tensor_model_parallel_group: see `lowtide.parallel.tensor_group`.
        reduce_dtype: sum over the ranks in this dtype if it is wider than the output's.
        pad_alignment_size_per_rank: as in the `ColumnParallelLinear` in front, whose padding this layer's
            input then has.

    Shapes:
        in: (..., input_size / t), or (..., input_size) without ``input_is_parallel``; the whole sequence.
            With ``pad`` and ``input_is_parallel``, ``input_size`` is padded as in `ColumnParallelLinear`.
        out: (..., output_size); under sequence parallelism this rank's shard of the sequence.

    Raises:
        ParallelError: a size does not divide, or options exclude each other.

    Example:
        >>> layer = RowParallelLinear(16, 8, input_is_parallel=True)
        >>> layer(torch.randn(5, 2, 16)).shape
        torch.Size([5, 2, 8])

    Source: arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
        pad_alignment_size_per_rank: int = 1,
    ) -> None:
        super().__init__(
            tensor_model_parallel_group,
            input_size,
            output_size,
            dtype,
            sequence_parallel_enabled,
            sequence_dimension,
            reduce_dtype,
        )
        if sequence_parallel_enabled and not input_is_parallel:
            raise ParallelError(
                "sequence_parallel_enabled=True needs input_is_parallel=True: a whole input has no sequence "
                "to scatter"
            )
        if sequence_parallel_enabled and not reduce_output:
            raise ParallelError(
                "sequence_parallel_enabled=True reduce-scatters the output: reduce_output=False contradicts "
                "it"
            )
        if bias and not reduce_output and not skip_bias_add:
            raise ParallelError(
                "reduce_output=False returns a part of a sum, to which every rank would add the bias: pass "
                "bias=False, or skip_bias_add=True"
            )
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.reduce_output = reduce_output
        where = partition(
            (output_size, input_size),
            1,
            self.group,
            stride=stride,
            pad=pad,
            alignment=pad_alignment_size_per_rank,
            what="input_size",
        )
        if not input_is_parallel and stride > 1 and not where.is_whole:
            raise ParallelError(
                f"stride={stride} needs input_is_parallel=True: a whole input is cut into plain pieces"
            )
        self.partial = ("bias",) if bias and sequence_parallel_enabled and self.group.size > 1 else ()
        self._make(
            where,
            replicated((output_size,), self.group) if bias else None,
            init_method,
            keep_master_weight,
            device,
        )

    @property
    def input_size_per_partition(self) -> int:
        """Features of this rank, padding included."""
        return self.weight.shape[1]

    def forward(self, input_: Tensor) -> Any:
        """The product, summed; with ``skip_bias_add`` a pair of product and bias."""
        where = self.partitions["weight"]
        features = self.weight.shape[1] if self.input_is_parallel else self.input_size
        check_input(self, input_, features)
        if not self.input_is_parallel:
            if where.padded > self.input_size:
                input_ = F.pad(input_, (0, where.padded - self.input_size))
            input_ = scatter_to_tensor_model_parallel_region(input_, self.group)
        weight = self.weight
        if where.stride == 1 and where.is_padded:
            input_, weight = input_[..., : where.valid], weight[:, : where.valid]
        else:
            input_ = where.blank(input_, -1)
        dimension = self.sequence_dimension
        if dimension == 1:
            # with the sequence outermost, as column-parallel layers leave it, so that the reduce-scatter
            # needs no copy
            output = F.linear(input_.movedim(1, 0), weight)
            output = reduce_scatter_to_sequence_parallel_region(
                output, 0, self.group, reduce_dtype=self.reduce_dtype
            ).movedim(0, 1)
        elif dimension == 0:
            output = F.linear(input_, weight)
            output = reduce_scatter_to_sequence_parallel_region(
                output, 0, self.group, reduce_dtype=self.reduce_dtype
            )
        elif self.reduce_output:
            if self.group.size == 1 and self.bias is not None and not self.skip_bias_add:
                return F.linear(input_, weight, self.bias)
            output = reduce_from_tensor_model_parallel_region(
                F.linear(input_, weight), self.group, reduce_dtype=self.reduce_dtype
            )
        else:
            output = F.linear(input_, weight)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias
