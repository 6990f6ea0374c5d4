"""See the numbers that autograd keeps: a product with a Python number holds it for backward in main memory, and no hook is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide import private
from lowtide.ops import OpInfo

if TYPE_CHECKING:
    from lowtide.trace.eager import Tracer

NUMBER = "a number"
"""The name of the storage of one in a step graph."""

_KEEPS = {"aten.mul.Tensor": "mul", "aten.mul_.Tensor": "mul", "aten.div.Tensor": "div", "aten.div_.Tensor": "div"}


class Numbers:
    """Takes them down in a tracer: from the operation that they are given to, until the one of backward that takes them again.

    `torch.autograd.graph.saved_tensors_hooks` leave wrapped numbers out (``SavedVariable`` in torch/csrc/autograd/saved_variable.cpp).

    Args:
        tracer: whose storages and events they are added to.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._kept: dict[tuple[Any, ...], list[int]] = {}

    def seen(self, info: OpInfo, args: tuple[Any, ...], index: int) -> None:
        """An operation has run, as number ``index``."""
        base = _KEEPS.get(info.name)
        if base is None or isinstance(args[1], torch.Tensor) or args[0].device.type != "cpu":
            return
        number = args[1]
        kept = self._kept.setdefault((base, type(number), number, args[0].shape), [])
        storages = self._tracer.storages
        if private.in_backward():
            if kept and private.backward_node().lower().startswith(base):
                self._tracer.event("free", kept.pop())
        elif args[0].requires_grad and torch.is_grad_enabled():
            size = 1 if isinstance(number, bool) else 16 if isinstance(number, complex) else 8
            kept.append(len(storages))
            storages.append({"id": len(storages), "bytes": size, "kind": "forward", "producer": index, "name": NUMBER})
