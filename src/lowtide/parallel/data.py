"""Gradients over ranks that see other data, and their norm over ranks that hold other parameters.

Both work in constant-size buffers, so that what they take does not grow with the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.parallel.checkpoint import partitions_of
from lowtide.parallel.gradients import BUFFER_BYTES, filled, flat_gradient
from lowtide.parallel.groups import tensor_group


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], group: Any = None, *, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Average the gradients of ``parameters`` over ranks that each saw a part of the batch.

    Args:
        parameters: the same ones in the same order on every rank; those without a gradient are left out, and must be so everywhere.
        group: see `lowtide.parallel.tensor_group`.
        buffer_bytes: the most bytes that travel at once.

    Returns:
        How many gradients were averaged.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.sum().backward()
    >>> average_gradients([weight])  # alone there is nothing to do
    0
    """
    group = tensor_group(group)
    if group.size == 1:
        return 0
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(flat_gradient(parameter))
    for (dtype, device), gradients in kinds.items():
        length = max(1, min(buffer_bytes // dtype.itemsize, sum(gradient.numel() for gradient in gradients)))
        buffer = torch.empty(length, dtype=dtype, device=device)
        for pieces in filled(gradients, length):
            used = sum(stop - start for _, start, stop in pieces)
            at = 0
            for flat, start, stop in pieces:
                buffer[at : at + stop - start].copy_(flat[start:stop])
                at += stop - start
            dist.all_reduce(buffer[:used], group=group.process_group)
            buffer[:used].div_(group.size)
            at = 0
            for flat, start, stop in pieces:
                flat[start:stop].copy_(buffer[at : at + stop - start])
                at += stop - start
    return sum(map(len, kinds.values()))


@torch.no_grad()
def gradient_norm(
    modules: Sequence[nn.Module], group: Any = None, *, tensor: Any = None, counted_elsewhere: Iterable[Tensor] = ()
) -> float:
    """The norm of the gradients of a model that ranks share, every parameter counted once.

    Args:
        modules: what this rank holds of the model.
        group: every rank that holds a part of the model: the tensor-parallel ranks of all pipeline stages, and where FSDP shards the
            parameters, the ranks that it shards them among.
        tensor: the tensor-parallel ranks, of which each has a copy of what is not cut.
        counted_elsewhere: parameters that another rank of ``group`` holds, too, and counts.

    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[-3.0]])
    >>> gradient_norm([layer])
    3.0
    """
    group, tensor = tensor_group(group), tensor_group(tensor)
    total = 0.0
    seen = {id(parameter) for parameter in counted_elsewhere}
    for module in modules:
        cut = partitions_of(module)
        for name, parameter in module.named_parameters():
            if id(parameter) in seen or parameter.grad is None:
                continue
            seen.add(id(parameter))
            if name in cut or tensor.rank == 0:
                gradient: Any = parameter.grad
                gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                total += float(torch.linalg.vector_norm(gradient, dtype=_wide(gradient.dtype)).double().square())
    if group.size > 1:
        device = next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
        summed = torch.tensor(total, dtype=torch.float64, device=device)
        dist.all_reduce(summed, group=group.process_group)
        total = float(summed)
    return math.sqrt(total)


@torch.no_grad()
def scale_gradients(modules: Sequence[nn.Module], norm: float, most: float) -> None:
    """Scale gradients of norm ``norm`` down to ``most``, as ``torch.nn.utils.clip_grad_norm_`` does.

    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[4.0]])
    >>> scale_gradients([layer], 4.0, 1.0)
    >>> round(float(layer.weight.grad), 4)
    1.0
    """
    share = min(1.0, most / (norm + 1e-6))
    if share == 1.0:
        return
    seen: set[int] = set()
    for module in modules:
        for parameter in module.parameters():
            if parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                parameter.grad.mul_(share)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
