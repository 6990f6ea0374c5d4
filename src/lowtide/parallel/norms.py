"""Norms for sequence-parallel regions: each rank normalizes its piece of the sequence, so the gradients of
scale and shift are partial.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.errors import expect, is_count
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_input, check_made, check_numbers
from lowtide.parallel.module import ParallelModule
from lowtide.parallel.partition import replicated


class _Norm(ParallelModule):
    """What the two norms share."""

    weight: nn.Parameter | None

    def __init__(self, shape: Any, eps: float | None, group: Any, sequence_parallel_enabled: bool) -> None:
        name = type(self).__name__
        sizes = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
        fits = len(sizes) > 0 and all(is_count(size, 1) for size in sizes)
        expect(fits, f"{name}'s size", shape, "whole numbers, 1 or more", ParallelError)
        if eps is not None:
            check_numbers(name, 0, eps=eps)
        super().__init__(group)
        self.normalized_shape: tuple[int, ...] = sizes
        self.eps = eps
        self.sequence_parallel_enabled = sequence_parallel_enabled

    def _make(self, names: tuple[str, ...], dtype: torch.dtype | None, device: Any) -> None:
        check_made(type(self).__name__, dtype, device)
        for name in ("weight", "bias"):
            if name in names:
                fill = nn.init.ones_ if name == "weight" else nn.init.zeros_
                self._fill(
                    name,
                    replicated(self.normalized_shape, self.group),
                    fill,
                    dtype or torch.get_default_dtype(),
                    device,
                )
            elif name not in self._parameters:
                self.register_parameter(name, None)
        self.partial = names if self.sequence_parallel_enabled and self.group.size > 1 else ()
        self._mark()

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, "
            f"sequence_parallel_enabled={self.sequence_parallel_enabled}"
        )


class LayerNorm(_Norm):
    """Layer norm over a shard of the sequence; the same result as ``nn.LayerNorm`` on every token.

    Args:
        normalized_shape: sizes of the last dimensions, which are normalized.
        eps: added to the variance.
        elementwise_affine: learn a scale and a shift.
        device, dtype: of the parameters.
        sequence_parallel_enabled: mark the parameters' gradients as parts of a sum over the ranks.
        tensor_model_parallel_group: see `lowtide.parallel.tensor_group`.
        bias: learn a shift, too.

    Returns:
        The input's shape and dtype, whatever the parameters' dtype is.

    Example:
        >>> LayerNorm(4)(torch.randn(3, 4, dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
        bias: bool = True,
    ) -> None:
        super().__init__(normalized_shape, eps, tensor_model_parallel_group, sequence_parallel_enabled)
        self.elementwise_affine = elementwise_affine
        self._make((("weight", "bias") if bias else ("weight",)) if elementwise_affine else (), dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimensions."""
        check_input(self, input, self.normalized_shape[-1])
        x = input if self.weight is None or input.dtype is self.weight.dtype else input.to(self.weight.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps or 0.0).to(input.dtype)


class RMSNorm(_Norm):
    """Root-mean-square norm over a shard of the sequence; the same result as ``nn.RMSNorm`` on every token.

    Args:
        hidden_size: size of the last dimension, which is normalized.
        eps: added to the mean square; ``None`` is the dtype's own epsilon.
        sequence_parallel_enabled: mark the weight's gradient as a part of a sum over the ranks.
        device, dtype: of the weight.
        tensor_model_parallel_group: see `lowtide.parallel.tensor_group`.

    Returns:
        The input's shape and dtype, whatever the weight's dtype is.

    Source: arXiv 1910.07467.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = 1e-6,
        sequence_parallel_enabled: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_model_parallel_group: Any = None,
    ) -> None:
        super().__init__(hidden_size, eps, tensor_model_parallel_group, sequence_parallel_enabled)
        self._make(("weight",), dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimension."""
        check_input(self, input, self.normalized_shape[-1])
        assert self.weight is not None
        x = input if input.dtype is self.weight.dtype else input.to(self.weight.dtype)
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps).to(input.dtype)
