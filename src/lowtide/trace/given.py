"""The loss that a `loss_fn` makes of a model's output, and whether a backward of the model begins there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.errors import TraceError
from lowtide.trace.describe import tensors_inside


def given_loss(loss_fn: Callable[[Any], torch.Tensor], result: Any, model: torch.nn.Module) -> torch.Tensor:
    """What ``loss_fn`` makes of what ``model`` returned.

    Raises:
        TraceError: it is no loss, or none of this model.
    """
    outputs = [tensor for tensor in tensors_inside(result) if tensor.requires_grad]
    own = {tensor.grad_fn for tensor in outputs} - {None}  # taken before: the function may write into an output
    leaves = {id(tensor) for tensor in (*outputs, *model.parameters())}
    loss = loss_fn(result)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TraceError(f"loss_fn returned {type(loss).__name__}: it has to return the loss, a tensor of one element")
    if outputs and loss.requires_grad and id(loss) not in leaves and not _reaches(loss.grad_fn, own, leaves):
        raise TraceError(
            "loss_fn returned a tensor that does not depend on the model: its backward would not reach the model at all. It is given the "
            "model's output and has to compute the loss from that"
        )
    return loss


def _reaches(start: Any, nodes: set[Any], leaves: set[int]) -> bool:
    """Whether autograd would come from a node to one of others, or to a leaf."""
    seen, ahead = set[Any](), [start]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if node in nodes or id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        ahead += [after for after, _ in node.next_functions]
    return False
