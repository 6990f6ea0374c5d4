"""Collectives and products, counted as they start."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SHORT = {
    "all_gather_into_tensor": "AG",
    "reduce_scatter_tensor": "RS",
    "all_reduce": "AR",
    "all_reduce_": "AR",
}


class Collectives(TorchDispatchMode):
    """Lists collectives and matrix products in the order in which they start, with the bytes that a ring
    moves for each on every rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.order: list[str] = []
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if func.namespace == "_c10d_functional" and name in SHORT:
            t = torch.distributed.get_world_size()
            kind = SHORT[name]
            self.seen.append(kind)
            self.order.append(kind)
            self.moved += (
                {"AG": result.nbytes, "RS": args[0].nbytes, "AR": 2 * args[0].nbytes}[kind] * (t - 1) // t
            )
        elif name == "wait_tensor":
            self.order.append("wait")
        elif name in ("mm", "addmm", "bmm", "addmm_"):
            self.order.append("mm")
        return result
