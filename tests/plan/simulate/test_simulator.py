"""The simulator: every rule of docs/design.md on a graph made for it, and all of them against a slow second
version.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph, with_gathered, with_resized, with_unasked
from reference import Infeasible, walk
from synthetic import Tape, chain, residual_network, transformer

from lowtide.errors import PlanError
from lowtide.graph import Event, Operation, Saved, StepGraph, Storage, Value
from lowtide.plan.simulate import Simulator, plain
from lowtide.plan.simulate.simulator import simulator_of


def test_plain_keeps_every_saved_tensor_until_its_release():
    graph = chain()
    step = plain(graph)
    assert step.replayed == () and step.extra_seconds == 0
    # At h_back: x 8, a 16, b 32, the loss is gone, the new gradient of b 32.
    assert step.peak_bytes == 8 + 16 + 32 + 32
    assert step.peak_operation is not None and step.peak_operation.name == "h_back"
    assert step.live_bytes[-1] == 8 + 8, "the parameter and its gradient"


def test_stored_base_is_held_for_what_rests_on_it():
    tape = Tape()
    x = tape.before(8, "parameter")
    (a,) = tape.op("f", [x], [16], seconds=1)
    (b,) = tape.op("g", [a], [32], seconds=1)
    (c,) = tape.op("h", [b], [4], seconds=1)
    tape.node("h_back", [tape.save(b)], c, [b], 1)
    tape.backward()
    graph = tape.graph()
    step = Simulator(graph).simulate([a])  # a is not saved by autograd, but b's replay starts from it
    assert step.replayed == (1,)
    release = graph.events.index(Event("release", 0))
    storage = graph.values[a].storage
    assert step.held_until == {storage: release}
    assert Simulator(graph).simulate([]).replayed == (0, 1)
    assert Simulator(graph).simulate([b]).held_until == {graph.values[b].storage: release}


def test_input_storage_is_resident_until_freed_or_held():
    tape = Tape()
    x = tape.before(64, "input")
    weight = tape.before(8, "parameter")
    (a,) = tape.op("f", [x, weight], [16], seconds=1)
    (b,) = tape.op("g", [a], [4], seconds=1)
    tape.node("g_back", [tape.save(a)], b, [a], 1)
    tape.backward()
    graph = tape.graph()
    at = graph.events.index(Event("op", 0))
    graph = StepGraph(
        **{**graph.__dict__, "events": (*graph.events[: at + 1], Event("free", 0), *graph.events[at + 1 :])}
    )
    kept = Simulator(graph).simulate([a])
    assert kept.live_bytes[at + 1] == 8 + 16, "the input is gone after its last use"
    given = Simulator(graph).simulate([])
    assert given.live_bytes[at + 1] == 64 + 8 + 16, "a's replay rests on the input"
    assert given.live_bytes[-1] == 8, "the input was let go with the release of a"


def test_saved_tensor_that_nobody_unpacks_is_not_replayed():
    graph = chain()
    events = tuple(e for e in graph.events if e not in (Event("unpack", 1), Event("done", 1)))
    step = Simulator(StepGraph(**{**graph.__dict__, "events": events})).simulate([1])
    assert step.replayed == () and step.extra_seconds == 0.5


def test_undroppable_saved_tensor_stays():
    graph = chain()
    fixed = tuple(Saved(s.id, s.value, False) if s.id == 1 else s for s in graph.saved)
    graph = StepGraph(**{**graph.__dict__, "saved": fixed})
    assert Simulator(graph).simulate([1]).replayed == ()
    assert Simulator(graph).simulate([1]).peak_bytes == plain(graph).peak_bytes


def test_infeasible_sets_are_refused_with_the_reason():
    tape = Tape()
    x = tape.before(8, "parameter")
    (a,) = tape.op("custom.kernel", [x], [16], replayable=False, seconds=1)
    (b,) = tape.op("g", [a], [16], seconds=1)
    (v2,) = tape.op("add_", [], mutates=[b], seconds=1)
    (c,) = tape.op("h", [v2], [4], seconds=1)
    tape.node("h_back", [tape.save(v2), tape.save(a)], c, [v2], 1)
    tape.backward()
    graph = tape.graph()
    with pytest.raises(PlanError, match=r"custom\.kernel .* not replayable"):
        Simulator(graph).simulate([])
    with pytest.raises(PlanError, match="cannot be stored"):
        Simulator(graph).simulate([b])
    assert Simulator(graph).close([]) == {a}
    assert Simulator(graph).simulate(Simulator(graph).close([])).replayed == (1, 2)


def test_an_equal_step_is_indexed_and_simulated_once():
    graph = chain()
    again, more = replace(graph, operations=tuple(graph.operations)), replace(graph, resident_bytes=10**6)
    assert plain(again) is plain(graph) and simulator_of(again) is simulator_of(graph)
    assert plain(more).peak_bytes == plain(graph).peak_bytes - graph.resident_bytes + 10**6


def test_step_without_operations():
    graph = StepGraph((), (Storage(0, 8, "parameter"),), (Value(0, 0, 0, None),), (), (), resident_bytes=8)
    assert plain(graph).peak_bytes == 8 and plain(graph).peak_operation is None
    one = StepGraph((Operation(0, "f", (), (), "forward"),), (), (), (), (Event("op", 0),), resident_bytes=3)
    assert Simulator(one).simulate([]).peak_bytes == 3


@pytest.mark.parametrize("make", [lambda: transformer(3), lambda: residual_network(5)])
def test_models_agree_with_the_reference(make):
    graph = make()
    sim = Simulator(graph)
    random = Random(0)
    for share in (0.0, 0.3, 0.7, 1.0):
        stored = sim.close(
            v.id for v in graph.values if v.producer is not None and v.storable and random.random() < share
        )
        fast = sim.simulate(stored)
        peak, extra, again = walk(graph, stored)
        assert (fast.peak_bytes, set(fast.replayed)) == (peak, again)
        assert fast.extra_seconds == pytest.approx(extra)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**9),
    st.integers(2, 10),
    st.integers(0, 10**9),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0, 0, 1, 3]),
)
def test_random_graphs_agree_with_the_reference(
    seed: int, operations: int, choice: int, unasked: float, resized: float, gathered: int
):
    graph = with_resized(with_unasked(random_graph(seed, operations), choice, unasked), choice, resized)
    graph = with_gathered(graph, choice, gathered)
    random = Random(choice)
    wanted = [v.id for v in graph.values if v.producer is not None and v.storable and random.random() < 0.4]
    try:
        slow = walk(graph, wanted)
    except Infeasible:
        with pytest.raises(PlanError):
            Simulator(graph).simulate(wanted)
        wanted = list(Simulator(graph).close(wanted))
        slow = walk(graph, wanted)
    fast = Simulator(graph).simulate(wanted)
    assert (fast.peak_bytes, set(fast.replayed)) == (slow[0], slow[2])
    assert fast.extra_seconds == pytest.approx(slow[1])
