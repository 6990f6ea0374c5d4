"""Recompute, offload and compress chosen together: never worse than one alone, never below the bound, bitwise
the same steps.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import meter, policies
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.plan.data import Chain, Compress, Link, Moving, Offload, decision_of
from lowtide.plan.mixes import MixedSearch
from lowtide.plan.moves import (
    default_placements,
    missing_links,
    placements_of,
)
from lowtide.plan.search import Search
from lowtide.plan.speeds import link_speeds

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


@pytest.mark.parametrize(("speed", "codec"), [(1e15, 1e6), (3e6, 1e15), (1e6, 3e6)])
def test_no_mix_is_below_the_bound_and_the_planner_comes_close(speed: float, codec: float) -> None:
    """Every mix of a small step, by hand: stored, recomputed, or moved in any way that fits."""
    graph = graph_of(2)
    links = {"disk": Link(speed, speed, 1e-6), "mask": Link(codec, codec), "positive": Link(codec, codec)}
    mixer = mixer_of(graph, [Offload("disk"), Compress("auto")], links)
    sim = mixer.sim
    values = sorted(sim.droppable)
    choices: list[list[Any]] = [["keep", "again", *mixer.placements.get(v, ())] for v in values]
    best: dict[int, float] = {}
    peaks = []
    for chosen in itertools.product(*choices):
        stored = frozenset(v for v, c in zip(values, chosen, strict=True) if c == "keep")
        moves = [c for c in chosen if not isinstance(c, str)]
        mix = mixer.candidate(stored, moves, 6144)
        peak, extra = mix.simulation.peak_bytes, mix.simulation.extra_seconds
        peaks.append(peak)
        best[peak] = min(best.get(peak, extra), extra)
    assert mixer.relaxation.least_peak <= min(peaks)
    for budget in sorted(set(peaks))[:: max(1, len(set(peaks)) // 6)]:
        least = min(extra for peak, extra in best.items() if peak <= budget)
        found = mixer.solve(budget)
        assert found.simulation.peak_bytes <= budget
        assert mixer.relaxation.bound(budget).extra_seconds <= least * (1 + 1e-6) + 1e-9
        assert least <= found.simulation.extra_seconds * (1 + 1e-9) + 1e-12
        assert found.simulation.extra_seconds <= least + 0.05 * graph.plain_seconds


def test_the_bound_is_stated_for_plans_that_move() -> None:
    graph = graph_of(8)
    budget = int(0.75 * lowtide.plan.plain(graph).peak_bytes)
    plan = policies.mixed("disk", links={"disk": Link(1e7, 1e7)}, min_bytes=1)(graph, budget)
    # all transfers hide beside the operations
    assert plan.moves and plan.bound_extra_seconds == plan.predicted_extra_seconds == 0
    slow = policies.mixed("disk", links={"disk": Link(3e5, 3e5)}, min_bytes=1)(graph, budget)
    assert 0 < slow.bound_extra_seconds <= slow.predicted_extra_seconds
    assert plan.bound_peak_bytes <= plan.predicted_peak_bytes <= budget
    again = policies.mixed("disk", links={"disk": Link(1e7, 1e7)}, min_bytes=1)(graph, budget)
    assert again.to_json() == plan.to_json()
    assert lowtide.Plan.from_json(plan.to_json()) == plan


def test_codecs_tiers_and_recomputing_take_their_shares() -> None:
    graph = graph_of(8)
    budget = int(0.75 * lowtide.plan.plain(graph).peak_bytes)

    def kinds(**links: Link) -> set[str]:
        plan = policies.mixed("disk", "auto", links=links, min_bytes=1)(graph, budget)
        assert plan.predicted_peak_bytes <= budget
        return {d.kind for d in plan.decisions.values()} - {"keep"}

    assert kinds(disk=SLOW, **CODECS) & {"compress"}
    assert kinds(disk=FAST, mask=SLOW, positive=SLOW) == {"offload"}
    assert kinds(disk=SLOW, mask=SLOW, positive=SLOW) == {"recompute"}


def test_what_moves_makes_room_for_what_would_be_recomputed() -> None:
    """Moving a few masks takes no time here, but does not save any, either, until their room is used."""
    graph = graph_of(6)
    policy = policies.mixed("disk", "auto", links={"disk": SLOW, **CODECS}, min_bytes=1)
    plan = policy(graph, int(0.7 * lowtide.plan.plain(graph).peak_bytes))
    assert plan.moves and plan.predicted_extra < 0.01


# below, timings decide whether anything moves
@pytest.mark.parametrize("share", [0.85, 0.8])
def test_a_step_under_a_mix_is_bitwise_the_same_and_within_its_budget(share: float) -> None:
    torch.manual_seed(0)
    plain, limited = Net(8), Net(8)
    limited.load_state_dict(plain.state_dict())
    x = torch.randn(64, 24)
    policy = policies.mixed("disk", "auto", links={"disk": Link(1e7, 1e7), **CODECS}, min_bytes=1)
    handle = lowtide.limit_memory(limited, budget=f"{share:.0%}", policy=policy)
    for seed in range(4):
        for model in (plain, limited):
            model.zero_grad()
            torch.manual_seed(seed)
            model(x).backward()
        assert all(
            torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), limited.parameters(), strict=True)
        )  # type: ignore[arg-type]
    plan = handle.plan
    assert plan is not None and plan.moves and plan.budget_bytes is not None
    limited.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    measured = meter.measure(lambda: limited(x).backward(), timeline=False)
    gradients = sum(p.nbytes for p in limited.parameters())
    peak = meter.resident_bytes(limited) - gradients + x.nbytes + plan.slab_bytes + measured.peak_bytes
    assert peak <= plan.budget_bytes
    assert peak == pytest.approx(plan.predicted_peak_bytes, abs=256)


def test_a_budget_that_no_mix_meets_is_refused_with_one_that_does() -> None:
    graph = graph_of(6)
    policy = policies.mixed("disk", links={"disk": FAST}, min_bytes=1)
    with pytest.raises(BudgetError) as refusal:
        policy(graph, 1)
    smallest = refusal.value.smallest_bytes
    assert policy(graph).predicted_peak_bytes == smallest  # what it aims at without a budget
    assert smallest is not None and policy(graph, smallest).predicted_peak_bytes <= smallest
    torch.manual_seed(0)
    model = Net(6)
    lowtide.limit_memory(model, budget="1KiB", policy=policy)
    with pytest.raises(BudgetError, match="smallest"):
        model(torch.randn(64, 24)).backward()


def test_ways_are_named_or_given() -> None:
    assert decision_of("host") == Offload("host") and decision_of("int8") == Compress("int8")
    with pytest.raises(PlanError, match="no way to move"):
        decision_of(3)  # type: ignore[arg-type]
    links = lowtide.measure_links("disk", "auto")
    assert {"disk", "mask", "positive"} <= links.keys() and all(
        link.read_bytes_per_second > 0 for link in links.values()
    )


def test_a_name_is_enough_for_the_tiers_and_codecs_of_this_machine() -> None:
    graph = graph_of(4)
    plan = lowtide.plan(graph, budget="90%", policy="mixed")
    assert plan.policy == "mixed" and plan.predicted_peak_bytes <= (plan.budget_bytes or 0)


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
def test_speeds_are_measured_once_and_in_little_room() -> None:
    link_speeds.cache_clear()
    device = torch.device("cpu")
    with meter.peak(device) as first:
        links = missing_links(default_placements("cpu"), None, (), "cpu")
    assert 0 < first.peak_bytes <= 6 << 20
    with meter.peak(device) as second:
        assert missing_links(default_placements("cpu"), None, (), "cpu") == links
    assert second.peak_bytes == 0
    link_speeds.cache_clear()


def test_codecs_are_offered_once_and_where_they_save() -> None:
    model = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24), nn.LayerNorm(24))
    graph = lowtide.trace(lambda: model(torch.randn(64, 24)).square().mean())
    sim = Search(graph).sim
    offered = [Compress("int4"), Chain(Compress("int4"), Offload("disk")), Compress("int8"), Compress("int8")]
    ways = placements_of(sim, offered, {}, 1)
    assert {tuple(m.decision for m in rows) for rows in ways.values()} == {tuple(offered[:3])}
    assert not placements_of(sim, [Compress("mask")], {}, 1 << 20)
    assert lowtide.measure_links("int4").keys() == {"int4"}
