"""A step's indices: who makes and reads each value, and what may come back."""

from __future__ import annotations

from synthetic import Tape, residual_network, transformer

from lowtide.graph import StepGraph
from lowtide.plan.simulate import Simulator
from lowtide.plan.simulate.index import StepIndex, bytes_over_time, replay_set


def two_saved() -> tuple[StepGraph, int, int]:
    """x -> a -> b, both saved, and what b is made by cannot run again."""
    tape = Tape()
    x = tape.before(8, "parameter")
    (a,) = tape.op("f", [x], [16])
    tape.node("f_back", [], a, [x], 1)
    (b,) = tape.op("g", [a], [32], replayable=False)
    tape.node("g_back", [tape.save(a)], b, [a], 1)
    (loss,) = tape.op("h", [b], [4])
    tape.node("h_back", [tape.save(b)], loss, [b], 1)
    tape.backward()
    return tape.graph(), a, b


def test_changes_add_up_over_time() -> None:
    assert bytes_over_time([(1, 8), (3, -8), (1, 2)], 4).tolist() == [0, 10, 10, 2]


def test_what_cannot_come_back_stays() -> None:
    graph, a, b = two_saved()
    index = StepIndex(graph)
    assert set(index.droppable) == {a, b}
    assert not index.must[a] and index.must[b]
    assert set(index.must_droppable) == {b}


def test_live_bytes_are_lowest_when_everything_is_evicted() -> None:
    for graph in (transformer(2), residual_network(4)):
        sim = Simulator(graph)
        plain = sim.simulate(sim.all_stored).live_bytes
        assert all(low <= high for low, high in zip(sim.natural_live, plain, strict=False))
        assert max(sim.natural_live) < max(plain)


def test_every_droppable_value_has_its_last_release_and_unpack() -> None:
    index = StepIndex(transformer(2))
    for value in index.droppable:
        assert index.last_unpack[value] <= index.saved_hold[value]
        assert index.saved_release[value] <= index.saved_hold[value] <= index.end
        assert index.op_event[index.producer[value]] < index.first_unpack <= index.last_unpack[value]


def test_a_replay_goes_back_to_what_is_there() -> None:
    index = StepIndex(transformer(2))
    value = index.droppable[-1]
    nothing = [producer < 0 for producer in index.producer]
    everything = [True] * len(index.producer)
    deep = replay_set([value], index.producer, index.reads, nothing)
    assert replay_set([value], index.producer, index.reads, everything) == {index.producer[value]} < deep
