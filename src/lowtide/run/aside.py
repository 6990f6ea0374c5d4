"""See whether what autograd saved on the way to outputs aside from the loss still stands."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from lowtide.trace.describe import tensors_inside

_KEY = "lowtide"


class _Mark:
    """Lives as long as the node of autograd's graph that it was left in."""


class Histories:
    """Those of some outputs: marks left in their nodes tell, even where the caller holds something that was made from an output.

    A node keeps its metadata, which are there for such notes, until it ends (``torch.autograd.graph.Node.metadata``).
    """

    def __init__(self) -> None:
        self._marks: list[weakref.ref[_Mark]] = []

    def follow(self, outputs: Iterable[torch.Tensor]) -> None:
        """Leave marks with these outputs."""
        for node in (output.grad_fn for output in outputs):
            if node is not None:
                mark = _Mark()
                node.metadata[_KEY, id(self)] = mark  # pyright: ignore
                self._marks.append(weakref.ref(mark))

    def any_held(self) -> bool:
        """Whether anyone holds one of them."""
        return any(mark() is not None for mark in self._marks)


def outputs_and_aside(result: Any, there: Iterable[Any], places: Iterable[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a forward returned, without those that are ``there`` anyhow, and those at ``places`` among all of them."""
    outputs, known = list(tensors_inside(result)), {id(tensor) for tensor in there}
    return [t for t in outputs if id(t) not in known], [outputs[place] for place in places if place < len(outputs)]
