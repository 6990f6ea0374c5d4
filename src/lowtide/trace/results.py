"""What a step or a model returned: the tensors in it, and the loss that backward begins from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributions import Distribution

from lowtide import private
from lowtide.errors import TraceError
from lowtide.meter.resident import plain_parts
from lowtide.ops import has_plain_storage


def plain_leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with a storage of their own inside a tensor, itself when it is plain."""
    return filter(has_plain_storage, plain_parts(tensor))


def tensors_returned(result: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a step returned, in containers, in the attributes of an output object, and in
    distributions, which stand on other ones. A wrapper (DTensor) has the history, not what is inside it.
    """
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list, dict)):
        for item in result.values() if isinstance(result, dict) else result:
            yield from tensors_returned(item)
    elif hasattr(result, "__dict__"):
        for item in vars(result).values():
            if isinstance(item, (torch.Tensor, tuple, list, dict, Distribution)):
                yield from tensors_returned(item)


def tensors_inside(result: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in what a step returned, found as `tensors_returned` does."""
    for tensor in tensors_returned(result):
        yield from plain_leaves(tensor)


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
    found = map(loss_of, result) if isinstance(result, (tuple, list)) else ()
    return next((loss for loss in found if loss is not None), None)


def loss_in(result: Any) -> torch.Tensor:
    """As `loss_of`, one number.

    Raises:
        TraceError: there is no loss.
    """
    loss = loss_of(result)
    if loss is None:
        what = type(result).__name__
        if isinstance(result, torch.Tensor):
            needs = "requires" if result.requires_grad else "does not require"
            what = f"a tensor of shape {tuple(result.shape)} that {needs} grad"
        raise TraceError(
            f"the step returned {what}, in which there is no loss: return a scalar tensor that requires "
            "grad, or an output with .loss, or run backward in the step"
        )
    return loss.sum() if loss.dim() else loss


def loss_to_plan_for(result: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """A loss of what a model returned: what ``loss_fn`` makes of it, the loss in it, or the sum of all that
    a gradient can come from.

    Raises:
        TraceError: there is nothing to begin a backward at, or ``loss_fn`` returned no loss.
    """
    if loss_fn is not None:
        loss = loss_fn(result)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TraceError(
                f"loss_fn returned {type(loss).__name__}: it has to return the loss, a tensor of one element"
            )
        return loss
    found = loss_of(result)
    if found is not None and not isinstance(result, (tuple, list)):
        return found  # itself: it may stand on more memory than a sum of it would (mse_loss)
    outputs = [private.own_part(t) for t in tensors_returned(result) if t.requires_grad]
    if not outputs:
        raise TraceError("no output of the model requires a gradient: there is no backward to plan for")
    total: Any = sum((t.abs() if t.is_complex() else t).sum().float() for t in outputs)
    return total
