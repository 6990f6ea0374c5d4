"""How gradients come from a loss outside the model: seen in the first step, whose trace took each output to get one in memory of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lowtide.trace.standin import NONE, SPREAD, WHOLE, differentiable_outputs


class OutsideGradients:
    """Those of one step's outputs, from when its forward has returned until the next step begins.

    A node of autograd's graph tells with what gradient it runs. That of an output which the model itself uses, too, comes with other gradients
    added; whether the loss had a part in it is judged by what was live when backward reached the model.

    Args:
        result: what the forward returned.
    """

    def __init__(self, result: Any) -> None:
        outputs = differentiable_outputs(result)
        self._bytes = [output.numel() * output.element_size() for output in outputs]
        self._ways: dict[int, int] = {}
        self._alone: set[int] = set()
        self._live_bytes: int | None = None
        edges = [(output.grad_fn, output.output_nr) for output in outputs]
        inner = _edges_behind([node for node, _ in edges if node is not None])
        for place, (node, number) in enumerate(edges):
            if node is not None and (node, number) not in inner and edges.count((node, number)) == 1:
                self._alone.add(place)
                node.register_prehook(_noting(weakref.ref(self), place, number))

    def note(self, place: int, gradient: torch.Tensor | None) -> None:
        """Backward comes to the output at ``place`` with this gradient."""
        if gradient is not None:
            spread = gradient.layout is torch.strided and gradient.untyped_storage().nbytes() < self._bytes[place]
            self._ways[place] = max(self._ways.get(place, NONE), SPREAD if spread else WHOLE)

    def reaches_model(self, live_bytes: int | None) -> None:
        """Backward has reached the model with so many bytes left by the loss."""
        self._live_bytes = live_bytes if live_bytes is not None else sum(self._bytes)

    def spare_bytes(self) -> int:
        """By how much a plan may be for too much: not all outputs can have gradients in memory of their own."""
        return sum(self._bytes) if self._live_bytes is not None and sum(self._bytes) > self._live_bytes else 0

    @property
    def seen(self) -> bool:
        """Whether a backward of this step has shown anything."""
        return self._live_bytes is not None and (bool(self._ways) or not self._alone)

    def ways(self) -> tuple[int, ...]:
        """How the gradient of each output came from the loss, once backward has ended; `WHOLE` is what cannot be told."""
        found = [self._ways.get(place, NONE) if place in self._alone else WHOLE for place in range(len(self._bytes))]
        left = (self._live_bytes or 0) - sum(size for size, way in zip(self._bytes, found, strict=True) if way == WHOLE)
        for place, size in enumerate(self._bytes):  # the last outputs are the likeliest to be of use to a loss
            if left < 0 and place not in self._alone:
                found[place], left = SPREAD, left + size
        return tuple(found)


def _noting(outside: weakref.ref[OutsideGradients], place: int, number: int) -> Callable[[Any], None]:
    def noted(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if (there := outside()) is not None:
            there.note(place, gradients[number])

    return noted


def _edges_behind(nodes: list[Any]) -> set[tuple[Any, int]]:
    """Where the nodes behind these hand gradients to."""
    found: set[tuple[Any, int]] = set()
    seen: set[Any] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            ahead = [(following, number) for following, number in node.next_functions if following is not None]
            found.update(ahead)
            left += [following for following, _ in ahead]
    return found
