"""Where the loss is in what a step returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_step import batch, make, names

import lowtide
from lowtide import TraceError


@pytest.mark.parametrize("what", ["loss", "object", "dict", "tuple", "own backward"])
def test_where_the_loss_is(what: str) -> None:
    model = make()

    class Output:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

    def step(x: torch.Tensor) -> Any:
        loss = model(x)
        if what == "own backward":
            loss.backward()
            return None
        return {"loss": loss, "object": Output(loss), "dict": {"loss": loss, "x": x}, "tuple": (loss, x)}[
            what
        ]

    graph = lowtide.trace(step, batch(), costs=False)
    assert names(graph, "backward")
    assert all(p.grad is None for p in model.parameters())


def test_a_step_without_a_loss() -> None:
    model = make()
    with pytest.raises(TraceError, match="loss"):
        lowtide.trace(lambda x: model.first(x), batch(), costs=False)
