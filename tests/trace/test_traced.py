"""Which line of the program calls an operation."""

from __future__ import annotations

import torch

import lowtide


def test_an_operation_has_the_line_that_calls_it() -> None:
    """The innermost line that is neither PyTorch's nor lowtide's own."""
    linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4)

    def step() -> torch.Tensor:
        h = linear(x)
        return h.sin().sum()

    first = step.__code__.co_firstlineno
    graph = lowtide.trace(step, model=linear, costs=False)
    lines = [op.source.rpartition("/")[2] for op in graph.operations if op.phase == "forward"]
    assert lines[:3] == [f"test_traced.py:{first + 1}"] + 2 * [f"test_traced.py:{first + 2}"]
    assert {op.source for op in graph.operations if op.phase == "backward"} == {""}
