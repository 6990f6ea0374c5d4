"""Who holds memory at a peak: every byte once, and in the words of the user's program; a refusal says what is
missing.
"""

from __future__ import annotations

from random import Random

import pytest
from random_graphs import random_graph, with_unasked
from synthetic import residual_network, transformer

from lowtide import policies
from lowtide.errors import PlanError
from lowtide.extensions.moves.simulate import simulate_plan, sources_of
from lowtide.graph import StepGraph
from lowtide.plan.simulate import Simulator
from lowtide.plan.simulate.holders import (
    FETCHED,
    MADE,
    RECOMPUTED,
    holders_at_peak,
    parts_of,
    planned_holders,
)
from lowtide.remedies import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    RESIDENT,
    STATE,
    Holder,
    in_lines,
    largest,
)


def unnamed(sim: Simulator, stored: frozenset[int]) -> int:
    """Bytes of a peak that no holder has."""
    simulation = sim.simulate(sim.close(stored))
    parts = parts_of(sim, simulation)
    resident = sum(parts.get(name, 0) for name in (PARAMETERS, BUFFERS, GRADIENTS, RESIDENT))
    found = holders_at_peak(sim, simulation)
    assert all(holder.bytes > 0 for holder in found)
    return simulation.peak_bytes - resident - sum(holder.bytes for holder in found)


@pytest.mark.parametrize("graph", [transformer(4), residual_network()], ids=["transformer", "residual"])
def test_every_byte_of_a_peak_has_one_holder(graph: StepGraph) -> None:
    sim, chance = Simulator(graph), Random(0)
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        stored = frozenset(value for value in sim.droppable if chance.random() < share)
        replayed = sim.simulate(sim.close(stored))
        scratch = replayed.peak_in_replay and replayed.peak_operation is not None
        left = unnamed(sim, stored)
        assert left == 0 or (scratch and 0 < left <= replayed.peak_operation.scratch_bytes)  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(60))
def test_no_byte_has_two_holders(seed: int) -> None:
    graph = with_unasked(random_graph(seed), seed)
    sim = Simulator(graph)
    try:
        assert unnamed(sim, frozenset()) >= 0
    except PlanError:
        assert unnamed(sim, frozenset(sim.droppable)) >= 0


def test_alike_layers_are_one_holder_and_copies_are_called_so() -> None:
    sim = Simulator(transformer(4))
    kept = holders_at_peak(sim, sim.simulate(frozenset(sim.droppable)))
    most = max((holder for holder in kept if holder.name == MADE), key=lambda holder: holder.bytes)
    assert "0-3" in most.module
    freed = holders_at_peak(sim, sim.simulate(sim.close(frozenset())))
    assert any(holder.name == RECOMPUTED for holder in freed)


def test_a_refusal_names_the_three_largest_with_what_frees_how_much() -> None:
    sim = Simulator(transformer(4))
    error = sim.refusal(sim.simulate(sim.close(frozenset())), 1)
    assert len(error.holders) == 3
    shown = str(error)
    assert "Largest at its peak, with the bytes that a remedy frees:" in shown
    assert all(line in shown for line in error.holders)


def test_the_optimizer_s_state_is_a_holder_like_any_other() -> None:
    held = largest([Holder(ACTIVATIONS, 5 << 20)], {STATE: 12 << 20, PARAMETERS: 6 << 20, "inputs": 99 << 20})
    assert [holder.name for holder in held] == [STATE, PARAMETERS, ACTIVATIONS]
    assert in_lines(held)[0] == (
        "12 MiB of optimizer state: lowtide.optim.HostOptimizer(..., host_fraction=1) frees about 12 MiB"
    )


@pytest.mark.parametrize("slab", [True, False])
def test_what_comes_back_is_a_holder_where_it_has_memory_of_its_own(slab: bool) -> None:
    graph = transformer(4)
    plan = policies.offload("disk", min_bytes=1, slab=slab)(graph)
    assert plan.moves and bool(plan.slab_bytes) == slab
    sim = Simulator(graph)
    found = holders_at_peak(sim, simulate_plan(sim, plan))
    assert not (slab and any(holder.name == FETCHED for holder in found))
    assert sum(holder.bytes for holder in found) <= plan.predicted_peak_bytes - plan.slab_bytes
    assert planned_holders(graph, plan, sources_of=sources_of)


def test_a_refusal_says_what_is_missing() -> None:
    refused = 0
    for seed in range(40):
        graph = random_graph(seed, operations=12)
        sim = Simulator(graph)
        try:
            sim.simulate(frozenset())
        except PlanError as error:
            refused += 1
            assert "must be stored" in str(error) or "which the step overwrites" in str(error)
    assert refused
