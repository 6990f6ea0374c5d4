"""Gradients over ranks that see other data, in a buffer of constant size, so that what it takes does not grow
with the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lowtide.parallel.gradients import BUFFER_BYTES, reduce_together
from lowtide.parallel.groups import tensor_group


def average_gradients(
    parameters: Iterable[Tensor], group: Any = None, *, buffer_bytes: int = BUFFER_BYTES
) -> int:
    """Average the gradients of ``parameters`` over ranks that each saw a part of the batch.

    Args:
        parameters: the same ones in the same order on every rank; those without a gradient are left out, and
            must be so everywhere.
        group: see `lowtide.parallel.tensor_group`; of a mesh it is the dimension ``dp``, of a unit the
            data-parallel group.
        buffer_bytes: the most bytes that travel at once.

    Returns:
        How many gradients were averaged.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.sum().backward()
    >>> average_gradients([weight])  # alone there is nothing to do
    0
    """
    group = tensor_group(group, "dp")
    if group.size == 1:
        return 0

    def mean(part: Tensor) -> Tensor:
        dist.all_reduce(part, group=group.process_group)
        return part.div_(group.size)

    return reduce_together(parameters, mean, buffer_bytes)
