"""Recompute, offload and compress chosen together: never worse than one alone, never below the bound, bitwise
the same steps.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from moving_steps import CODECS, FAST, SLOW, Net, graph_of, mixer_of

import lowtide
from lowtide import meter, policies
from lowtide.errors import BudgetError, PlanError
from lowtide.plan.data import Compress, Link, Offload, decision_of


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
