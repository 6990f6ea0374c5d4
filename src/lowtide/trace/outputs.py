"""What a step's caller can hold on to beside the loss: the outputs, and what autograd saved on the way to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.graph import Event
from lowtide.trace.describe import tensors_inside

if TYPE_CHECKING:
    from lowtide.trace.eager import Tracer


class Outputs:
    """Takes both down in a tracer: `hold` when the forward has returned, `let_go` when the traced step's own caller has let the outputs go.

    Backward lets go of what was saved on the way to the loss as it runs, whoever holds the rest; what ends with the outputs is theirs alone.

    Args:
        tracer: whose events are looked at.

    Attributes:
        storages: of the outputs.
        withheld: what ends with the outputs' history, as far as backward does not run through it; as of `lowtide.graph.StepGraph`.
        aside: places of the outputs that have such a history, among the tensors in what was returned.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._from = 0
        self.storages: set[int] = set()
        self.withheld: list[Event] = []
        self.aside: list[int] = []

    def hold(self, result: Any, loss: torch.Tensor) -> None:
        """The step returned ``result``; backward begins at ``loss``."""
        tracer = self._tracer
        outputs = list(tensors_inside(result))
        self.storages = {number for tensor in outputs if (number := tracer.known(tensor)) is not None}
        inside = history(loss)
        self.aside = [place for place, tensor in enumerate(outputs) if tensor.grad_fn is not None and tensor.grad_fn not in inside]
        self._from = len(tracer.events)

    def let_go(self) -> None:
        """Nothing holds what the step returned any longer, apart from the loss."""
        kinds = ("release", "free") if self._tracer.fake else ("release",)  # what keeps a step for real small lets go of its own, too
        ended = self._tracer.events[self._from :]
        self.withheld = [event for event in ended if event.kind in kinds and not (event.kind == "free" and event.index in self.storages)]


def history(loss: torch.Tensor) -> set[Any]:
    """The nodes that backward from ``loss`` runs through."""
    found: set[Any] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return found
