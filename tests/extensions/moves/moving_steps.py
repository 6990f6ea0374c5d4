"""A small step whose values may move, and the search for its mixes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import lowtide
from lowtide.extensions.moves.mixed import MixedSearch
from lowtide.extensions.moves.placements import (
    placements_of,
)
from lowtide.graph import StepGraph
from lowtide.plan.data import Link, Moving
from lowtide.plan.search import Search

FAST, SLOW = Link(1e15, 1e15), Link(1e3, 1e3)


CODECS = {"mask": FAST, "positive": FAST}


class Net(nn.Module):
    """Linear layers with ReLU and dropout between them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.relu(layer(x)), 0.2)
        return x.square().mean()


def graph_of(layers: int) -> StepGraph:
    """A step whose operations take as long as their outputs are large, so that nothing rests on timings."""
    torch.manual_seed(0)
    model = Net(layers)
    graph = lowtide.trace(lambda: model(torch.randn(64, 24)), costs=False)
    written = [
        sum(graph.storages[graph.values[w].storage].bytes for w in op.writes) for op in graph.operations
    ]
    timed = tuple(
        replace(op, seconds=1e-3 + 1e-7 * size) for op, size in zip(graph.operations, written, strict=True)
    )
    return replace(graph, operations=timed, plain_seconds=sum(op.seconds for op in timed))


def mixer_of(graph: StepGraph, ways: list[Moving], links: dict[str, Link], window: int = 6144) -> MixedSearch:
    planner = Search(graph)
    return MixedSearch(planner, placements_of(planner.sim, ways, links, 1), links, window)
