"""What stands in for a loss that lies outside the model: it reads the outputs, and hands backward a gradient of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.errors import TraceError
from lowtide.ops import tensors_of

NONE, SPREAD, WHOLE = 0, 1, 2
"""How the gradient of an output comes from the loss: not at all, as one number spread over its shape (that of a sum), or in memory of its own."""


def differentiable_outputs(result: Any) -> list[torch.Tensor]:
    """Those tensors of what a model returned that a loss may hand gradients to."""
    return [t for t in tensors_of(_items(result)) if t.requires_grad and (t.is_floating_point() or t.is_complex())]


def stand_in(result: Any, ways: Sequence[int] | None = None) -> torch.Tensor:
    """A loss of these outputs.

    A gradient in memory of its own stays until backward comes to where the output was made, which may be late: attention maps, hidden states.

    Args:
        result: what the model returned.
        ways: of the gradient of each of its `differentiable_outputs`; ``None`` is `WHOLE` for all.

    Raises:
        TraceError: no output requires a gradient.
    """
    outputs = differentiable_outputs(result)
    if ways is None or len(ways) != len(outputs) or not any(ways):
        ways = [WHOLE] * len(outputs)
    reached = [(output, way) for output, way in zip(outputs, ways, strict=True) if way != NONE]
    if not reached:
        raise TraceError("no output of the model requires a gradient: there is no backward to plan for")
    loss: Any = _StandIn.apply([way for _, way in reached], *(output for output, _ in reached))
    return loss


class _StandIn(torch.autograd.Function):
    """Keeps nothing but shapes, as no loss that is stood in for is known to keep anything."""

    @staticmethod
    def forward(ctx: Any, ways: list[int], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.outputs = [(tuple(t.shape), _strides(t), t.dtype, t.device, way) for t, way in zip(outputs, ways, strict=True)]
        return torch.zeros((), dtype=torch.float32, device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        found = []
        for shape, strides, dtype, device, way in ctx.outputs:
            if way == WHOLE:
                found.append(torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(1))
            else:
                found.append(torch.ones((), dtype=dtype, device=device).expand(shape))
        return (None, *found)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """As a gradient of it has them: its own order, without gaps."""
    order = sorted(range(tensor.dim()), key=lambda axis: (tensor.stride(axis), -axis)) if tensor.layout is torch.strided else None
    found, step = [0] * tensor.dim(), 1
    for axis in order if order is not None else reversed(range(tensor.dim())):
        found[axis], step = step, step * max(1, tensor.shape[axis])
    return tuple(found)


def _items(result: Any) -> Any:
    if isinstance(result, dict):
        return list(result.values())
    if hasattr(result, "__dict__") and not isinstance(result, torch.Tensor):
        return list(vars(result).values())
    return result
