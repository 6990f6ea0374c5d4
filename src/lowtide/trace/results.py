"""What a step or a model returned: the tensors in it, and the loss that backward begins from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributions import Distribution

from lowtide.errors import TraceError
from lowtide.meter.resident import plain_parts
from lowtide.ops import has_plain_storage


def plain_leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with a storage of their own inside a tensor, itself when it is plain."""
    return filter(has_plain_storage, plain_parts(tensor))


def tensors_inside(result: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in what a step returned, in containers, in the attributes of an output object, and in
    distributions, which stand on other ones.
    """
    if isinstance(result, torch.Tensor):
        yield from plain_leaves(result)
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from tensors_inside(item)
    elif isinstance(result, dict):
        for item in result.values():
            yield from tensors_inside(item)
    elif hasattr(result, "__dict__"):
        for item in vars(result).values():
            if isinstance(item, (torch.Tensor, tuple, list, dict, Distribution)):
                yield from tensors_inside(item)


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
    if (
        outputs
        and loss.requires_grad
        and id(loss) not in leaves
        and not any(
            node in own or id(getattr(node, "variable", None)) in leaves for node in nodes_behind([loss])
        )
    ):
        raise TraceError(
            "loss_fn returned a tensor that does not depend on the model: its backward would not reach the "
            "model at all. It is given the model's output and has to compute the loss from that"
        )
    return loss


def nodes_behind(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Every node of autograd's graph that a backward from ``outputs`` may come to, each once.

    >>> x = torch.ones(2, requires_grad=True)
    >>> [node.name() for node in nodes_behind([x.exp().sum()])]
    ['SumBackward0', 'ExpBackward0', 'torch::autograd::AccumulateGrad']
    """
    ahead = [tensor.grad_fn for tensor in outputs]
    seen = set[Any]()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += [after for after, _ in node.next_functions]
