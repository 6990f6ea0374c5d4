"""The smallest budget that is named is a function of the step's bytes: whatever its operations are timed at,
it can be met.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from random_graphs import random_graph
from synthetic import residual_network, transformer
from torch import Tensor, nn

import lowtide
from lowtide import policies
from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan.policies.chosen import least_time
from lowtide.plan.search import Search, search_of


def timed_anew(graph: StepGraph, seed: int) -> StepGraph:
    """The same step where each operation takes between a fifth of its time and five times as long, and all
    else that is timed, too.
    """
    numbers = random.Random(seed)

    def factor() -> float:
        return 5.0 ** numbers.uniform(-1, 1)

    return replace(
        graph,
        operations=tuple(replace(op, seconds=(op.seconds or 1e-6) * factor()) for op in graph.operations),
        plain_seconds=graph.plain_seconds * factor(),
        overhead_seconds=1e-4 * factor(),
        replay_overhead_seconds=1e-6 * factor(),
    )


def smallest(graph: StepGraph) -> int:
    """What a refusal names."""
    with pytest.raises(BudgetError) as refusal:
        Search(graph).solve(1)
    assert refusal.value.smallest_bytes is not None
    return refusal.value.smallest_bytes


STEPS: dict[str, Callable[[], StepGraph]] = {
    "transformer": lambda: transformer(1),
    "long sequences": lambda: transformer(1, tokens=128, hidden=32, heads=4, sequence=128, vocab=64),
    "convolutions": lambda: residual_network(4),
}


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS.keys())
def test_the_named_budget_is_met_whatever_operations_are_timed_at(make: Callable[[], StepGraph]) -> None:
    graph = make()
    planner = Search(graph)
    least = planner.smallest.simulation
    named = least.peak_bytes
    assert planner.solve(named).simulation.extra_seconds <= least.extra_seconds
    other = timed_anew(graph, 1)
    search_of.cache_clear()
    assert least_time(other, named).predicted_peak_bytes <= named
    assert search_of(other).smallest.simulation.peak_bytes == named


def test_named_budgets_of_random_steps_are_met() -> None:
    for seed in range(12):
        graph = random_graph(seed, 4 + seed % 9)
        named = smallest(graph)
        assert Search(timed_anew(graph, seed)).solve(named).simulation.peak_bytes <= named


def test_no_simple_policy_needs_less_than_what_is_named() -> None:
    graph = residual_network(3)
    named = smallest(graph)
    for policy in (policies.full(blocks=["layers.0", "layers.1"]), policies.sqrt(), policies.keep_all()):
        assert policy(graph).predicted_peak_bytes >= named


def test_what_was_found_below_the_named_budget_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Search(transformer(1))
    with monkeypatch.context() as patch:  # nothing below is found by going down
        start = planner.baselines[1]
        patch.setattr(Search, "smallest", start)
        lower = planner.solve(start.simulation.peak_bytes - 1)
        assert lower.simulation.peak_bytes < start.simulation.peak_bytes
        patch.setattr(Search, "_search", lambda self, budget, *more: None)  # another round finds less
        assert planner.solve(lower.simulation.peak_bytes) is lower
        with pytest.raises(BudgetError):
            planner.solve(lower.simulation.peak_bytes - 1)


class Block(nn.Module):
    """Attention and a wide MLP: the least peak of a stack is in every block's MLP at once."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        normed = self.norms[0](h)
        h = h + self.attend(normed, normed, normed, need_weights=False)[0]
        return h + self.mlp(self.norms[1](h))


def test_what_is_as_high_in_each_of_alike_blocks_is_lowered_in_all_at_once() -> None:
    """One decision changed in one block lowers the peak there and raises it in all others, so the least was
    that of checkpointing each block, where plans for a given budget took 9 % less.
    """
    blocks, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(8, 64, 64)
    graph = lowtide.trace(lambda: blocks(x).pow(2).mean(), model=blocks, costs=False)
    per_block = lowtide.plan(graph, policy="full").predicted_peak_bytes
    assert Search(graph).smallest.simulation.peak_bytes < 0.92 * per_block


def test_the_least_is_never_above_a_plan_of_the_same_search() -> None:
    graph = transformer(2)
    named = smallest(graph)
    search = search_of(graph)
    lower = replace(search.smallest, simulation=replace(search.smallest.simulation, peak_bytes=named - 1))
    search._found_before.append(lower)
    assert search.lowest is lower and search.smallest.simulation.peak_bytes == named
    search_of.cache_clear()
