"""The loss in what a step or a model returned, and one to plan for where the loss lies outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.errors import TraceError
from lowtide.trace.describe import tensors_inside


def loss_of(result: Any) -> torch.Tensor | None:
    """The loss in what a step returned: a scalar tensor with a history, an output's ``loss``, or the first
    such in a tuple or mapping.
    """
    if isinstance(result, torch.Tensor):
        return result if result.numel() == 1 and result.requires_grad else None
    loss = getattr(result, "loss", None)
    if loss is None and isinstance(result, dict):
        loss = result.get("loss")
    if isinstance(loss, torch.Tensor):
        return loss_of(loss)
    if isinstance(result, (tuple, list)):
        for item in result:
            found = loss_of(item)
            if found is not None:
                return found
    return None


def loss_to_plan_for(
    result: Any, loss_fn: Callable[[Any], torch.Tensor] | None, model: torch.nn.Module
) -> torch.Tensor:
    """A loss of what ``model`` returned: what ``loss_fn`` makes of it, the loss in it, or the sum of all that
    a gradient can come from.

    Raises:
        TraceError: there is nothing to begin a backward at, or what ``loss_fn`` returned is no loss of the
            model.
    """
    if loss_fn is not None:
        return _given_loss(loss_fn, result, model)
    found = loss_of(result)
    if found is not None and not isinstance(result, (tuple, list)):
        return found  # itself: it may stand on more memory than a sum of it would (mse_loss)
    outputs = [t for t in tensors_inside(result) if t.requires_grad]
    if not outputs:
        raise TraceError("no output of the model requires a gradient: there is no backward to plan for")
    total: Any = sum((t.abs() if t.is_complex() else t).sum().float() for t in outputs)
    return total


def _given_loss(loss_fn: Callable[[Any], torch.Tensor], result: Any, model: torch.nn.Module) -> torch.Tensor:
    outputs = [tensor for tensor in tensors_inside(result) if tensor.requires_grad]
    # taken before: the function may write into an output
    own = {tensor.grad_fn for tensor in outputs} - {None}
    leaves = {id(tensor) for tensor in (*outputs, *model.parameters())}
    loss = loss_fn(result)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TraceError(
            f"loss_fn returned {type(loss).__name__}: it has to return the loss, a tensor of one element"
        )
    if outputs and loss.requires_grad and id(loss) not in leaves and not _reaches(loss.grad_fn, own, leaves):
        raise TraceError(
            "loss_fn returned a tensor that does not depend on the model: its backward would not reach the "
            "model at all. It is given the model's output and has to compute the loss from that"
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
