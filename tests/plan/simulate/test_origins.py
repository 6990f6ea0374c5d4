"""Whose gradient a tensor of backward is: never of another value than autograd's, or of none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.graph import StepGraph
from lowtide.plan.simulate import Simulator
from lowtide.plan.simulate.holders import PASSING, holders_at_peak
from lowtide.plan.simulate.origins import Origins
from lowtide.remedies import SCORES


class Attention(nn.Module):
    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.scaled, self.qkv, self.out = scaled, nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.scaled:
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v)).sum()
        scores = q @ k.transpose(-1, -2) / 8
        return self.out(nn.functional.dropout(scores.softmax(-1)) @ v).sum()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).sum()


def traced(model: nn.Module, x: torch.Tensor) -> StepGraph:
    return lowtide.trace(lambda: model(x), model=model)


def makers(graph: StepGraph, *names: str) -> list[str | None]:
    """The modules that made what the results of these operations of backward are the gradients of."""
    origins = Origins(graph)
    found = [op for op in graph.operations if op.phase == "backward" and op.name.split(".")[1] in names]
    return [origins.maker(op.writes[0])[0] for op in found]


def test_a_gradient_is_of_what_the_operation_read_whose_backward_made_it() -> None:
    graph = traced(Blocks(), torch.randn(8, 16))
    assert makers(graph, "gelu_backward") == ["blocks.2.1", "blocks.1.1", "blocks.0.1"]
    inputs = [name for name in makers(graph, "mm") if name is not None]  # the others are of weights
    layers = (2, 0)  # of the GELU, the norm
    assert inputs[0] == "" and inputs[1:] == [
        f"blocks.{block}.{layer}" for block in (2, 1, 0) for layer in layers
    ]


def test_where_paths_meet_it_is_of_the_value_they_begin_at() -> None:
    graph = traced(Blocks(), torch.randn(8, 16, requires_grad=True))
    origins = Origins(graph)
    sums = [op for op in graph.operations if op.phase == "backward" and op.name.startswith("aten.add")]
    residual = [
        op.writes[0] for op in graph.operations if op.name == "aten.add.Tensor" and op.phase == "forward"
    ]
    assert [origins.of(op.writes[0]) for op in sums][:2] == [(residual[1],), (residual[0],)]


def test_pieces_of_a_convolutional_network() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    graph = lowtide.trace(lambda: model(torch.randn(2, 3, 8, 8)).sum(), model=model)
    assert makers(graph, "convolution_backward") == ["2", None], "the first one's input has no gradient"
    assert makers(graph, "threshold_backward", "native_batch_norm_backward") == ["1", "0"]


@pytest.mark.parametrize("length", [64, 128])  # 64: queries have as many numbers as scores
def test_gradients_of_queries_and_of_scores_are_not_taken_for_each_other(length: int) -> None:
    graph = traced(Attention(), torch.randn(2, length, 64))
    origins = Origins(graph)
    softmax = next(op for op in graph.operations if op.name == "aten._softmax.default")
    assert {*softmax.reads, *softmax.writes} < origins.scores
    assert all(graph.values[value].shape[-2:] == (length, length) for value in origins.scores)
    backward = next(op for op in graph.operations if "_softmax_backward" in op.name)
    assert origins.of(backward.writes[0]) == softmax.reads
    first, *_, last = [op for op in graph.operations if op.phase == "backward" and ".bmm." in op.name]
    assert origins.of(first.writes[0]) and not origins.scores.intersection(origins.of(first.writes[0]))
    assert origins.maker(last.writes[0]) == (None, ""), "of a key, or of what softmax made"


@pytest.mark.parametrize(
    "step",
    [
        lambda: nn.functional.softmax(nn.Linear(8, 8)(torch.randn(4, 8)), -1).sum(),
        lambda: Attention(scaled=True)(torch.randn(2, 1, 128, 64)),
    ],
)
def test_nothing_else_is_attention_scores(step: Callable[[], torch.Tensor]) -> None:
    assert not Origins(lowtide.trace(step)).scores


def test_holders_at_a_peak_have_the_line_of_a_gradient_and_scores_are_one_holder() -> None:
    sim = Simulator(traced(Attention(), torch.randn(2, 512, 64)))
    most, *_ = holders_at_peak(sim, sim.simulate(frozenset(sim.droppable)))
    assert most.name == SCORES and most.form == "2x512x512 float32" and "test_origins.py:" in most.source
    words, freed = most.remedy
    assert "scaled_dot_product_attention" in words and freed == most.bytes >= 3 * 2 * 512 * 512 * 4
    sim = Simulator(traced(Blocks(), torch.randn(512, 16)))
    passing = [
        one for one in holders_at_peak(sim, sim.simulate(sim.close(frozenset()))) if one.name == PASSING
    ]
    assert passing and all("test_origins.py:" in one.source for one in passing if ".2" in one.module)
