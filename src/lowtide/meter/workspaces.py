"""The workspaces of cuBLAS, which stand in a GPU's memory from the first product of matrices on.

PyTorch takes one from its allocator for each thread that multiplies, and keeps it: 32 MiB on a Hopper, 8.1
MiB on most others. A training step multiplies on two threads, forward's and the one on which autograd runs
backward for the device.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from lowtide import private

_THREADS = 2


class _Taken(threading.local):
    """On which devices and streams this thread and backward's have theirs."""

    def __init__(self) -> None:
        self.where: set[tuple[int | None, int]] = set()


_TAKEN = _Taken()


def workspace_bytes(device: torch.device) -> int:
    """Bytes of the workspaces of a training step on ``device``; 0 where there are none, as on a CPU."""
    return _THREADS * private.blas_workspace_bytes(device)


def standing_workspace_bytes(device: torch.device) -> int:
    """The same, of a step that runs on this thread and the current stream: from here on they stand.

    So they are no part of what a step that is watched from here on allocates, be it the first.
    """
    count = workspace_bytes(device)
    if count and device.type == "cuda":
        at = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        where = at.index, torch.cuda.current_stream(at).cuda_stream
        if where not in _TAKEN.where:
            _TAKEN.where.add(where)
            with torch.enable_grad():
                _Takes.apply(torch.ones(1, device=at, requires_grad=True)).backward()  # type: ignore[union-attr]
    return count


class _Takes(torch.autograd.Function):
    """Multiplies on forward's thread and on backward's."""

    @staticmethod
    def forward(_: Any, one: torch.Tensor) -> torch.Tensor:
        private.take_blas_workspaces(one.device)
        return one.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        private.take_blas_workspaces(gradient.device)
        return gradient
