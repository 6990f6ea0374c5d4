"""Gradients over ranks that see other data, in a buffer of constant size, so that what it takes does not grow
with the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.parallel.gradients import BUFFER_BYTES, filled, flat_gradient
from lowtide.parallel.groups import tensor_group


@torch.no_grad()
def average_gradients(
    parameters: Iterable[Tensor], group: Any = None, *, buffer_bytes: int = BUFFER_BYTES
) -> int:
    """Average the gradients of ``parameters`` over ranks that each saw a part of the batch.

    Args:
        parameters: the same ones in the same order on every rank; those without a gradient are left out, and
            must be so everywhere.
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
            kinds.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(
                flat_gradient(parameter)
            )
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
