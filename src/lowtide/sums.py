"""Gradients that meet: where no mode watches it, autograd adds the second to the first in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lowtide import private
from lowtide.private import NodeKey

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_SHRINKS = "aten.sum."
"""Broadcasting's end: a node that runs only this hands other gradients on as they came."""


class Sums:
    """The engine's own additions, told from those of the formulas that it runs.

    A node's gradient is collected in a buffer. Autograd adds to the tensor in it in place if nobody else holds that (``can_accumulate_inplace``
    in torch/csrc/autograd/input_buffer.cpp), but out of place wherever a dispatch mode is active, so that a watched step would take one
    gradient more than a step that runs alone. A mode asks here what to run instead.

    The engine adds with the node still current that ran last, so that a formula's own sum looks alike. It is the engine's if another node
    made the first summand and did not hand it to this one.

    Example:
        >>> import torch
        >>> from torch.utils._python_dispatch import TorchDispatchMode
        >>> class Watching(TorchDispatchMode):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.sums, self.seen = Sums(), []
        ...     def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ...         func = self.sums.instead(func, args, kwargs or {})
        ...         self.seen.append(str(func))
        ...         result = func(*args, **(kwargs or {}))
        ...         if private.in_backward():
        ...             self.sums.ran(str(func), [private.storage_key(result)])
        ...         return result
        >>> h = torch.randn(3, requires_grad=True).exp()
        >>> with Watching() as watching:
        ...     (h.sin() + 2 * h.cos()).sum().backward()
        >>> "aten.add_.Tensor" in watching.seen
        True
    """

    def __init__(self) -> None:
        private.engine_holds()  # watched now: it takes a backward
        self._edges: dict[NodeKey, tuple[NodeKey, ...]] = {}
        self._ran: set[NodeKey] = set()
        self._makers: dict[int, NodeKey] = {}  # storage address -> the node that ran when it was written last

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What to run in place of ``func``: itself, or the addition in place that autograd would run if nobody watched.

        Args:
            func: the overload that is about to run; call this before anything else holds its arguments.
            args: of it.
            kwargs: of it.
        """
        if func is not _ADD or kwargs or len(args) != 2 or torch.is_grad_enabled() or not private.in_backward():
            return func
        if not private.only_engine_holds(args):
            return func
        held, other = args
        if type(held) is not type(other) or held.dtype != other.dtype or held.shape != other.shape or not _is_dense(held):
            return func
        here, maker = private.node_key(), self._makers.get(private.storage_key(held))
        if here is None or maker is None or maker == here or self._hands_on(maker, here):
            return func
        return _ADD_IN_PLACE

    def ran(self, name: str, written: Iterable[int]) -> None:
        """An operation has run in backward.

        Args:
            name: of it.
            written: addresses of the storages that it made or wrote to.
        """
        here = private.node_key()
        if here is None:
            return
        if not name.startswith(_SHRINKS):
            self._ran.add(here)
        if here not in self._edges:
            self._edges.update(private.nodes_from_here(self._edges))
        self._makers.update(dict.fromkeys(written, here))

    def _hands_on(self, maker: NodeKey, here: NodeKey) -> bool:
        """Whether what ``maker`` returned may have come to ``here`` as it was, through nodes that ran nothing."""
        seen: set[NodeKey] = set()
        ahead = list(self._edges.get(maker, ()))
        while ahead:
            node = ahead.pop()
            if node == here:
                return True
            if node not in seen and node not in self._ran:
                seen.add(node)
                ahead += self._edges.get(node, ())
        return False


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one piece of memory, none twice, in whatever order."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
