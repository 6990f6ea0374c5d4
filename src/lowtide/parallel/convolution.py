"""`OutputChannelParallelConv2d` and `InputChannelParallelConv2d`: convolutions whose channels ranks share.

An output-channel-parallel layer holds the filters of some output channels; an input-channel-parallel layer
takes some input channels and sums over the ranks. One after the other they need a single sum, as a
column-parallel and a row-parallel linear layer do. Parameters, their order and their defaults are
neuronx-distributed's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.errors import expect, is_count
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_counts, check_dtypes, check_input
from lowtide.parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from lowtide.parallel.module import InitMethod, ParallelModule, check_reduce_dtype
from lowtide.parallel.partition import Partition, partition, replicated

CHANNELS = -3
"""The channels' dimension of an input, (batch, channels, height, width) or (channels, height, width)."""

Pair = int | tuple[int, int]


class _ParallelConv2d(ParallelModule):
    """What the two layers share: the whole convolution's settings and the parameters.

    Attributes:
        kernel_size, stride, padding, dilation: height and width.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        sizes: tuple[int, int],
        pairs: dict[str, Pair],
        groups: int,
        padding_mode: str,
        group: Any,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        name = type(self).__name__
        check_counts(name, 1, in_channels=sizes[0], out_channels=sizes[1])
        check_dtypes(name, dtype=dtype, reduce_dtype=reduce_dtype)
        expect(groups == 1, f"{name}(groups=)", groups, "1: grouped channels are not shared", ParallelError)
        zeros = padding_mode == "zeros"
        expect(zeros, f"{name}(padding_mode=)", padding_mode, "'zeros'", ParallelError)
        super().__init__(group)
        self.in_channels, self.out_channels = sizes
        self.kernel_size = _pair(name, "kernel_size", pairs["kernel_size"], 1)
        self.stride = _pair(name, "stride", pairs["stride"], 1)
        self.padding = _pair(name, "padding", pairs["padding"], 0)
        self.dilation = _pair(name, "dilation", pairs["dilation"], 1)
        self.dtype = dtype
        self.reduce_dtype = check_reduce_dtype(reduce_dtype, dtype)
        self.master_weight: Tensor | None = None

    def _cut(self, dimension: int, pad: bool) -> Partition:
        """This rank's part of the weight."""
        shape = (self.out_channels, self.in_channels, *self.kernel_size)
        what = ("out_channels", "in_channels")[dimension]
        remedy = "pass partition_pad=True"
        return partition(shape, dimension, self.group, pad=pad, what=what, remedy=remedy)

    def _convolve(self, images: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(images, self.weight, bias, self.stride, self.padding, self.dilation)

    def _check(self, given: Tensor, channels: int) -> None:
        check_input(self, given)
        shape = tuple(given.shape)
        fits = given.ndim in (3, 4) and shape[CHANNELS] == channels
        if not fits:  # Dynamo may not trace what raises
            name, allowed = f"{type(self).__name__}'s input shape", f"(batch, {channels}, height, width)"
            expect(fits, name, shape, allowed, ParallelError)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, bias={self.bias is not None}, rank "
            f"{self.group.rank} of {self.group.size}"
        )


class OutputChannelParallelConv2d(_ParallelConv2d):
    """A convolution whose output channels are split among the ranks.

    Args:
        in_channels: channels in.
        out_channels: channels out, of the whole layer.
        kernel_size, stride, padding, dilation: in pixels; one number, or height and width.
        groups: 1.
        bias: add a bias, of which each rank has the part of its channels.
        padding_mode: ``"zeros"``.
        gather_output: give every rank all channels instead of its own.
        dtype, device: of the parameters.
        init_method: fills the whole weight in place; ``None`` is what ``nn.Conv2d`` does.
        keep_master_weight: keep the whole initial weight as ``master_weight``.
        partition_pad: make ``out_channels`` divide by channels of zeros, which are never trained.
        tensor_model_parallel_group: see `lowtide.parallel.tensor_group`.
        reduce_dtype: the input's gradient is summed over the ranks in this dtype if it is wider than the
            gradient's.

    Shapes:
        in: (batch, in_channels, height, width), or without the batch; equal on every rank.
        out: (batch, out_channels / t, height, width), or (batch, out_channels, ...) with ``gather_output``.

    Raises:
        ParallelError: the channels do not divide; an argument is something else.

    Example:
        >>> layer = OutputChannelParallelConv2d(3, 8, 3, padding=1, gather_output=False)
        >>> layer(torch.randn(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])

    Source: neuronx-distributed's layer of that name, which takes a dilation of 1 only.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            (in_channels, out_channels),
            {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation},
            groups,
            padding_mode,
            tensor_model_parallel_group,
            dtype,
            reduce_dtype,
        )
        self.gather_output = gather_output
        where = self._cut(0, partition_pad)
        bias_where = partition((out_channels,), 0, self.group, pad=partition_pad, what="out_channels")
        self._make(where, bias_where if bias else None, init_method, keep_master_weight, device)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution; this rank's channels, or all."""
        self._check(input, self.in_channels)
        images = copy_to_tensor_model_parallel_region(input, self.group, reduce_dtype=self.reduce_dtype)
        own = self._convolve(images, self.bias)
        if not self.gather_output:
            return self.partitions["weight"].blank(own, CHANNELS)
        every = gather_from_tensor_model_parallel_region(own, self.group, dimension=CHANNELS)
        return every if every.shape[CHANNELS] == self.out_channels else every[..., : self.out_channels, :, :]


class InputChannelParallelConv2d(_ParallelConv2d):
    """A convolution whose input channels are split among the ranks; outputs are summed over the ranks.

    Args:
        in_channels: channels in, of the whole layer.
        out_channels: channels out.
        bias: add a bias, after the sum; every rank has all of it.
        input_is_parallel: the input is this rank's channels, as an `OutputChannelParallelConv2d` without
            ``gather_output`` gives them.
        kernel_size, stride, padding, dilation, groups, padding_mode, dtype, device, init_method,
            keep_master_weight, tensor_model_parallel_group: as in `OutputChannelParallelConv2d`.
        partition_pad: make ``in_channels`` divide by channels of zeros, which are never trained.
        reduce_dtype: sum over the ranks in this dtype if it is wider than the output's.

    Shapes:
        in: (batch, in_channels / t, height, width), or (batch, in_channels, ...) without
            ``input_is_parallel``; also without the batch.
        out: (batch, out_channels, height, width), equal on every rank.

    Raises:
        ParallelError: the channels do not divide; an argument is something else.

    Example:
        >>> layer = InputChannelParallelConv2d(8, 3, 3, padding=1, input_is_parallel=True)
        >>> layer(torch.randn(2, 8, 5, 5)).shape
        torch.Size([2, 3, 5, 5])

    Source: neuronx-distributed's layer of that name, which takes a dilation of 1 only.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            (in_channels, out_channels),
            {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation},
            groups,
            padding_mode,
            tensor_model_parallel_group,
            dtype,
            reduce_dtype,
        )
        self.input_is_parallel = input_is_parallel
        bias_where = replicated((out_channels,), self.group) if bias else None
        self._make(self._cut(1, partition_pad), bias_where, init_method, keep_master_weight, device)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution, summed."""
        where = self.partitions["weight"]
        self._check(input, self.weight.shape[1] if self.input_is_parallel else self.in_channels)
        if self.input_is_parallel:
            own = where.blank(input, CHANNELS)
        else:
            missing = where.padded - self.in_channels
            every = F.pad(input, (0, 0, 0, 0, 0, missing)) if missing else input
            own = scatter_to_tensor_model_parallel_region(every, self.group, dimension=CHANNELS)
        if self.group.size == 1:
            return self._convolve(own, self.bias)
        output = reduce_from_tensor_model_parallel_region(
            self._convolve(own, None), self.group, reduce_dtype=self.reduce_dtype
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)[:, None, None]


def _pair(layer: str, name: str, given: Any, least: int) -> tuple[int, int]:
    """Height and width of what is one number or two."""
    pair = tuple(given) if isinstance(given, list | tuple) else (given, given)
    fits = len(pair) == 2 and all(is_count(number, least) for number in pair)
    allowed = f"a whole number, {least} or more, or two of them"
    expect(fits, f"{layer}({name}=)", given, allowed, ParallelError)
    return pair[0], pair[1]
