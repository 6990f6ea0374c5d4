"""Plans and graphs for other sizes of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_graphs import random_graph
from synthetic import transformer

import lowtide
import lowtide.plan
from lowtide.graph import StepGraph
from lowtide.plan import policies
from lowtide.plan.simulate import plain, simulate
from lowtide.plan.transfer import CARRIED, dominates, interpolate, same_program, transfer


def step(length: int, layers: int = 3) -> StepGraph:
    """Attention's scores grow with the square of the length, the rest in a straight line."""
    return transformer(layers, tokens=4 * length, sequence=length)


@pytest.mark.parametrize("policy", ["optimal", "full", "selective"])
def test_a_plan_holds_for_another_size_with_the_peak_that_it_has_there(policy: str):
    large, small = step(128), step(96)
    plan = lowtide.plan.make(large, "100%" if policy == "full" else "75%", policy)
    carried = transfer(plan, large, small)
    assert carried is not None
    assert (
        carried.stored == plan.stored
        and carried.program == plan.program
        and carried.decisions == plan.decisions
    )
    assert carried.graph == small.fingerprint() and carried.policy == policy and carried.notes == (CARRIED,)
    seen = simulate(small, plan.stored)
    assert carried.predicted_peak_bytes == seen.peak_bytes < plan.predicted_peak_bytes
    assert carried.predicted_extra_seconds == seen.extra_seconds


def test_a_plan_is_carried_over_only_within_the_budget_and_to_the_same_operations():
    large, small = step(128), step(96)
    plan = lowtide.plan.make(large, "75%")
    peak = transfer(plan, large, small).predicted_peak_bytes  # type: ignore[union-attr]
    assert transfer(plan, large, small, peak).budget_bytes == peak  # type: ignore[union-attr]
    assert transfer(plan, large, small, peak - 1) is None
    assert transfer(plan, large, step(96, layers=2)) is None
    other = replace(
        small, operations=(replace(small.operations[0], name="aten.other.default"), *small.operations[1:])
    )
    assert not same_program(large, other) and transfer(plan, large, other) is None


def test_values_that_move_are_carried_over():
    large, small = step(128), step(96)
    plan = policies.offload(min_bytes=1)(large, None)
    carried = transfer(plan, large, small)
    assert carried is not None
    assert {m.value: m.decision for m in carried.moves} == {m.value: m.decision for m in plan.moves}
    assert [m.bytes for m in carried.moves] == [
        small.storages[small.values[m.value].storage].bytes for m in plan.moves
    ]


@pytest.mark.parametrize("seed", range(20))
def test_what_dominates_has_the_higher_peak(seed: int):
    graph = random_graph(seed)
    smaller = replace(graph, storages=tuple(replace(s, bytes=s.bytes - s.bytes // 3) for s in graph.storages))
    assert dominates(graph, graph) and dominates(graph, smaller) and not dominates(smaller, graph)
    plan = lowtide.plan.make(graph, None)
    assert simulate(smaller, plan.stored).peak_bytes <= simulate(graph, plan.stored).peak_bytes
    assert plain(smaller).peak_bytes <= plain(graph).peak_bytes
    assert not dominates(graph, replace(smaller, events=(*smaller.events[1:], smaller.events[0])))


def test_a_length_between_is_made_exactly():
    made = interpolate({n: step(n) for n in (32, 64, 128)}, 96)
    assert made is not None and made.structure() == step(96).structure()
    assert [op.scratch_bytes for op in made.operations] == [op.scratch_bytes for op in step(96).operations]
    low, high = step(64).plain_seconds, step(128).plain_seconds
    assert low < made.plain_seconds < high


def test_what_the_traced_lengths_do_not_say_is_not_made():
    two = {n: step(n) for n in (32, 128)}
    assert interpolate(two, 96) is None
    three = {**two, 64: step(64)}
    assert interpolate(three, 256) is None and interpolate(three, 16) is None
    assert interpolate(three, 64) is three[64]
    assert interpolate({**two, 64: step(64, layers=2)}, 96) is None
    odd = three[64]
    bent = replace(
        odd, storages=(*odd.storages[:-1], replace(odd.storages[-1], bytes=odd.storages[-1].bytes + 4))
    )
    assert interpolate({**two, 64: bent}, 96) is None


def test_scratch_that_changes_in_steps_is_known_where_the_neighbours_agree():
    def with_scratch(length: int, bytes_: int) -> StepGraph:
        graph = step(length)
        return replace(
            graph, operations=(replace(graph.operations[0], scratch_bytes=bytes_), *graph.operations[1:])
        )

    traced = {32: with_scratch(32, 64), 64: with_scratch(64, 256), 128: with_scratch(128, 256)}
    made = interpolate(traced, 96)
    assert made is not None and made.operations[0].scratch_bytes == 256
    assert interpolate(traced, 48) is None


def test_a_traced_model_at_a_length_that_was_not_traced():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    head = torch.nn.Linear(16, 8)

    def trace(length: int) -> StepGraph:
        x, targets = torch.randn(2, length, 16), torch.randint(8, (2, length))
        net = torch.nn.ModuleList([layer, head])
        return lowtide.trace(
            lambda: torch.nn.functional.cross_entropy(head(layer(x)).flatten(0, 1), targets.flatten()),
            model=net,
            costs=False,
        )

    made = interpolate({n: trace(n) for n in (8, 16, 24, 32)}, 20)
    assert made is not None and made.structure() == trace(20).structure()
