"""What replays hold while backward runs: rules 8 to 10 of docs/design.md."""

from __future__ import annotations

from synthetic import Tape, chain

from lowtide.graph import Event, StepGraph
from lowtide.plan.simulate import Simulator


def test_evicted_value_is_replayed_at_its_unpack_and_costs_its_operation():
    graph = chain()
    step = Simulator(graph).simulate([1])  # a stays, b goes
    assert step.replayed == (1,)
    assert step.extra_seconds == 2 + 0.125 + 0.5
    assert step.evicted == (2,)
    assert step.peak_bytes == 8 + 16 + 32 + 32, "the copy of b stands where b stood"


def test_replay_reaches_through_values_that_are_not_stored():
    graph = chain()
    step = Simulator(graph).simulate([])
    assert step.replayed == (0, 1)
    assert step.extra_seconds == 1 + 2 + 2 * 0.125 + 0.5
    # First unpack (b): replay of f caches a (16), which g and a's saved tensor still read; g makes b (32)
    # with scratch 5.
    unpack = graph.events.index(Event("unpack", 1))
    assert step.top_bytes[unpack] == 8 + 16 + 32 + 5
    # a stays cached for its own unpack although b's replay has read it.
    done = graph.events.index(Event("done", 1))
    assert step.live_bytes[done] == 8 + 16 + 32, "x, the copy of a, the gradient of b"


def test_copy_with_no_readers_left_lives_until_done():
    graph = chain()
    step = Simulator(graph).simulate([1])
    unpack, done = graph.events.index(Event("unpack", 1)), graph.events.index(Event("done", 1))
    assert step.live_bytes[unpack] == 8 + 16 + 32
    assert step.live_bytes[done] == 8 + 16 + 32, "the gradient of b is there now, the copy is gone"


def test_in_place_replay_reuses_the_copy_or_clones_it():
    def graph_of(save_before: bool) -> StepGraph:
        tape = Tape()
        x = tape.before(8, "parameter")
        (a,) = tape.op("f", [x], [16], seconds=1)
        if save_before:
            (c,) = tape.op("side", [a], [2], seconds=1)
            tape.node("side_back", [tape.save(c)], c, [a], 1)
        (b,) = tape.op("relu_", [], mutates=[a], seconds=1)
        (loss,) = tape.op("h", [b, *([c] if save_before else [])], [4], seconds=1)
        tape.node("relu_back", [tape.save(b)], loss, [b], 1)
        tape.backward()
        return tape.graph()

    graph = graph_of(False)
    step = Simulator(graph).simulate([])
    assert step.replayed == (0, 1)
    unpack = graph.events.index(Event("unpack", 0))
    assert step.top_bytes[unpack] == 8 + 16, "relu_ works on the copy that f made"
    graph = graph_of(True)
    step = Simulator(graph).simulate([])
    assert step.replayed == (0, 1, 2)
    unpack = graph.events.index(Event("unpack", 1))
    assert step.top_bytes[unpack] == 8 + 16 + 16, "the old version has another reader: relu_ works on a clone"


def test_argument_overwritten_unseen_is_an_output_like_any_other():
    tape = Tape()
    x = tape.before(8, "parameter")
    (empty,) = tape.op("empty_like", [], [16], seconds=1, replayable=False)
    (mask,) = tape.op("bernoulli_", [], unseen=[empty], random=True, seconds=1)
    (y,) = tape.op("mul", [x, mask], [8], seconds=1)
    tape.node("mul_back", [tape.save(mask)], y, [x], 1)
    tape.backward()
    step = Simulator(tape.graph()).simulate([])
    assert step.replayed == (1,), "empty_like need not run again"


def test_second_unpack_gets_an_uncached_replay():
    graph = chain()
    events = list(graph.events)
    release = events.index(Event("release", 1))
    events[release:release] = [Event("unpack", 1), Event("done", 1)]
    twice = StepGraph(**{**graph.__dict__, "events": tuple(events)})
    assert Simulator(twice).simulate([1]).extra_seconds == 2 * (2 + 0.125) + 0.5
    assert Simulator(twice).simulate([1, 2]).extra_seconds == 0


def test_copy_waits_for_a_reader_that_never_comes_until_it_is_let_go():
    tape = Tape()
    x = tape.before(8, "parameter", "x")
    (a,) = tape.op("f", [x], [16], seconds=1)
    (side,) = tape.op("side", [a], [2], seconds=1)
    unasked = tape.save(side)
    (b,) = tape.op("g", [a], [32], seconds=1)
    tape.node("g_back", [tape.save(b)], b, [a], 1)
    tape.backward()
    graph = tape.graph()
    done = graph.events.index(Event("done", 1))
    begins = graph.events.index(Event("unpack", 1))

    def copies(released: int) -> int:
        events = list(graph.events)
        events.insert(released, Event("release", unasked))
        step = Simulator(StepGraph(**{**graph.__dict__, "events": tuple(events)})).simulate([])
        assert step.replayed == (0, 2)
        return int(step.live_bytes[begins + (released <= begins)]) - 8

    assert copies(done) == 16 + 32, "side's operation, which reads a, could still be asked for"
    assert copies(begins) == 32, "nobody can ask for it any more"
