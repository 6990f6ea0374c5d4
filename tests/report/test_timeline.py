"""A step as blocks of memory: at every operation they add up to what the simulator says, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph, with_gathered, with_resized
from synthetic import residual_network, transformer

from lowtide import policies
from lowtide.extensions.moves.simulate import sources_of
from lowtide.graph import StepGraph
from lowtide.plan import Plan, make
from lowtide.plan.blocks import default_blocks
from lowtide.plan.data import Chain, Compress, Moving, Offload
from lowtide.plan.simulate import Simulation, Simulator, plain
from lowtide.report.timeline import KINDS, Timeline, timeline


def agrees(graph: StepGraph, plan: Plan | None) -> Timeline:
    """The timeline, after its bytes were compared with the simulator's at every operation."""
    line = timeline(graph, plan)
    simulated = plain(graph) if plan is None else simulate_plan(graph, plan)
    live = line.live_bytes()
    ran = [int(bytes_) for bytes_, tick in zip(live, line.ticks, strict=True) if tick.phase != "replay"]
    places = [at for at, event in enumerate(graph.events) if event.kind == "op"]
    assert ran == [int(simulated.top_bytes[at]) for at in places]
    # where a fill is the peak no operation runs, and there is no tick
    fills = [simulated.top_bytes[at] for at, event in enumerate(graph.events) if event.kind == "fill"]
    assert line.peak_bytes == simulated.peak_bytes or simulated.peak_bytes in fills
    assert all(span.bytes > 0 and span.born < span.gone for span in line.spans)
    assert {span.kind for span in line.spans} <= set(KINDS)
    return line


def simulate_plan(graph: StepGraph, plan: Plan) -> Simulation:
    sim = Simulator(graph)
    return sim.simulate(plan.stored, sources_of(sim, plan)).with_resident(plan.slab_bytes)


def by_kind(line: Timeline, tick: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for span in line.holders(tick):
        found[span.kind] = found.get(span.kind, 0) + span.bytes
    return found


@pytest.mark.parametrize("build", [transformer, residual_network], ids=["transformer", "residual"])
@pytest.mark.parametrize("policy", ["keep_all", "full", "sqrt", "optimal"])
def test_blocks_add_up_to_what_is_simulated(build: Callable[[], StepGraph], policy: str) -> None:
    graph = build()
    agrees(graph, None)
    plan = make(graph, "70%" if policy == "optimal" else None, policy)
    line = agrees(graph, plan)
    again = sum(tick.phase == "replay" for tick in line.ticks)
    assert again >= len(plan.replayed)
    assert (again > 0) == ("recomputed" in {span.kind for span in line.spans}) == bool(plan.replayed)
    assert not any(span.kind == "moved" for span in line.spans)


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_random_steps_add_up_under_full_recomputation(seed: int) -> None:
    graph = random_graph(seed)
    agrees(graph, None)
    agrees(graph, policies.make_plan(graph, stored=()))


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_storages_that_the_program_empties_and_fills_add_up(seed: int) -> None:
    """Gathered weights of FSDP2, and what a model resizes itself."""
    graph = with_gathered(with_resized(random_graph(seed), seed), seed)
    agrees(graph, None)
    agrees(graph, make(graph, policy="full") if default_blocks(graph) else None)


@pytest.mark.parametrize("slab", [False, True])
@pytest.mark.parametrize(
    "decision",
    [Offload(), Compress("int8"), Chain(Compress("int8"), Offload())],
    ids=["host", "int8", "both"],
)
def test_moved_values_add_up(decision: Moving, slab: bool) -> None:
    graph = transformer(3)
    wide = [tensor.value for tensor in graph.saved if tensor.droppable and tensor.module.endswith("mlp.act")]
    plan = policies.make_plan(graph, stored=(), moves=dict.fromkeys(wide, decision), slab=slab)
    assert plan.moves
    line = timeline(graph, plan)
    assert line.peak_bytes == plan.predicted_peak_bytes
    assert all(span.bytes > 0 for span in line.spans)
    assert any(span.kind == "moved" for span in line.spans)
    assert any(span.decision in ("offloaded", "compressed") for span in line.spans)
    assert any(span.name.startswith("slab") for span in line.spans) == bool(plan.slab_bytes)


def test_the_peak_of_a_plain_step_is_made_of_activations_by_module() -> None:
    line = timeline(transformer(3))
    kinds = by_kind(line, line.peak_tick)
    assert max(kinds, key=kinds.__getitem__) == "activation"
    saved = [span for span in line.holders(line.peak_tick) if span.kind == "activation"]
    assert {"h.0.mlp.act", "h.1.mlp.act", "h.2.mlp.act"} <= {span.module for span in saved}
    assert sum(kinds.values()) == line.peak_bytes


def test_gradients_are_live_to_the_end_and_parameters_throughout() -> None:
    graph = transformer(2)
    line = timeline(graph)
    last = len(line.ticks)
    parameters = [span for span in line.spans if span.kind == "parameter"]
    assert all((span.born, span.gone) == (0, last) for span in parameters)
    gradients = [span for span in line.spans if span.kind == "gradient"]
    assert gradients
    assert all(span.gone == last and line.ticks[span.born].phase == "backward" for span in gradients)


def test_the_optimizer_and_what_the_step_never_touched_are_named() -> None:
    graph = transformer(1)
    more = replace(graph, resident_bytes=graph.resident_bytes + 1000)
    names = {span.name: span.bytes for span in timeline(more, None, optimizer_bytes=900).spans}
    assert (names["optimizer state"], names["not used in this step"]) == (900, 100)


def test_the_clock_ends_where_the_forecast_does() -> None:
    graph = transformer(2)
    plan = make(graph, "70%")
    line = timeline(graph, plan)
    times = [tick.seconds for tick in line.ticks]
    assert times == sorted(times)
    assert line.seconds == pytest.approx(plan.plain_seconds + plan.predicted_extra_seconds)
    assert times[-1] < line.seconds
