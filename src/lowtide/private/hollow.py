"""Tensors without memory, and what autograd does with a graph behind its backward.

Seen in PyTorch 2.13 to 2.13, not tried with earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def hollow(kind: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass that answers every operation itself: it has a shape, and no memory.

    Args:
        kind: the subclass.
    """
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)  # pyright: ignore


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore
"""Whether the backward that runs was called with ``retain_graph``."""
