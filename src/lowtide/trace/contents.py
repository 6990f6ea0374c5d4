"""Made-up inputs that let an operation do as much as in a step, where what is in them says how much that
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide import private
from lowtide.ops import asks, masks_of, tensors_of

GROUPED = "aten._grouped_mm.default"
"""A product of matrices in groups, the ends of which are an argument."""


def fit(func: private.OpOverload, args: Sequence[Any], trues: Sequence[int] = ()) -> None:
    """Write to such arguments of a call: so many elements of masks are true, groups are of equal size, and
    lengths are one.

    Args:
        func: the operation.
        args: its made-up arguments; other integers are zero, which is an index that is valid everywhere.
        trues: as of `lowtide.trace.costs.OpSpec`.
    """
    if str(func) == GROUPED and len(args) > 2 and args[2] is not None:
        first, second, ends = args[:3]
        rows = second.shape[-1] if first.dim() == 3 else first.shape[0 if second.dim() == 3 else 1]
        ends.copy_(torch.arange(1, len(ends) + 1, device=ends.device) * rows // len(ends))
    elif trues:
        for mask, count in zip(masks_of(func, args), trues, strict=True):
            flat = torch.zeros(mask.numel(), dtype=mask.dtype, device=mask.device)
            flat[:count] = 1
            mask.copy_(flat.view(mask.shape))
    elif asks(func):
        for tensor in tensors_of(args):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                tensor.fill_(1)
