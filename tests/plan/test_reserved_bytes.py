"""What a plan's steps reserve on CUDA, by a model of PyTorch's allocator."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from random_graphs import random_graph, with_resized
from synthetic import transformer

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.meter.reserved import CachingAllocator
from lowtide.plan.reserved_bytes import (
    allocator_before_step,
    block_changes,
    reserved_after,
    reserved_either_way,
)
from lowtide.plan.simulate import Simulation, Simulator, plain
from lowtide.plan.simulate.walk import LiveCopies


@pytest.mark.parametrize("seeds", [range(start, start + 40) for start in range(0, 200, 40)])
def test_blocks_take_the_bytes_that_the_simulator_predicts(seeds: range) -> None:
    checked = 0
    for seed in seeds:
        graph = with_resized(random_graph(seed), seed) if seed % 2 else random_graph(seed)
        simulator = Simulator(graph)
        try:
            stored = simulator.close(v for v in simulator.droppable if Random(seed + v).random() < 0.5)
            simulation = simulator.simulate(stored)
        except PlanError:
            continue
        checked += 1
        check(graph, stored, simulation)
    assert checked > 30


def check(graph: StepGraph, stored: frozenset[int], simulation: Simulation) -> None:
    inputs = sum(storage.bytes for storage in graph.storages if storage.kind == "input")
    live = most = graph.resident_bytes - inputs
    there: dict[tuple[str, int], int] = {}
    for name, bytes in block_changes(graph, stored):
        if bytes:
            assert name not in there
            there[name] = bytes
        live += bytes or -there.pop(name, 0)
        most = max(most, live)
    assert most == simulation.peak_bytes
    assert live == (simulation.live_bytes[-1] if len(graph.events) else most)


def test_the_blocks_of_an_operation_come_and_go_as_they_were_recorded() -> None:
    """Forward and replay ask for results and scratch in the order of the profiled run, not scratch as one."""
    graph = transformer()
    stored = Simulator(graph).close(())
    replayed = {moment.operation for moment in moments_of(graph, stored)}
    op = next(op for op in graph.operations if op.index in replayed and len(op.writes) == 1)
    made = graph.storages[graph.values[op.writes[0]].storage].bytes
    recorded = (7000, 3000, made, -1, 500, -2)  # the block of 500 is given back as the operation ends
    graph = graph.with_operations(lambda one: replace(one, blocks=recorded) if one is op else one)
    changes = list(block_changes(graph, stored))
    begins = [at for at, (_, bytes) in enumerate(changes) if bytes == 7000]
    assert len(begins) == 2
    for at, kind in zip(begins, ("storage", "copy"), strict=True):
        names, bytes = zip(*changes[at : at + 7], strict=True)
        assert bytes == (7000, 3000, made, 0, 500, 0, 0)
        assert [name[0] for name in names] == ["scratch", "scratch", kind, *["scratch"] * 4]
        assert names[3] == names[0] and names[5:] == (names[1], names[4])


def test_a_resident_batch_is_not_asked_for_again() -> None:
    graph = transformer()
    inputs = [(("storage", s.id), s.bytes) for s in graph.storages if s.kind == "input" and s.bytes]
    stored = Simulator(graph).close(())
    anew, resident = (list(block_changes(graph, stored, batch_resident=there)) for there in (False, True))
    assert inputs and anew[: len(inputs)] == inputs
    assert [change for change in anew if change[0] not in dict(inputs)] == resident
    reserved = [reserved_after(graph, stored, CachingAllocator(), 1, (), there) for there in (False, True)]
    assert reserved[0] >= reserved[1]


def moments_of(graph: StepGraph, stored: frozenset[int]) -> list[LiveCopies]:
    seen: list[LiveCopies] = []
    Simulator(graph).simulate(stored, seen=seen)
    return seen


def test_what_is_reserved_settles_and_a_smaller_plan_reserves_less() -> None:
    graph = transformer()
    storages = tuple(replace(storage, bytes=64 * storage.bytes) for storage in graph.storages)
    graph = replace(graph, storages=storages, resident_bytes=64 * graph.resident_bytes)
    simulator = Simulator(graph)
    kept, evicted = simulator.close(simulator.droppable), simulator.close(())
    after = {}
    for name, stored in (("kept", kept), ("evicted", evicted)):
        allocator = allocator_before_step(graph, CachingAllocator())
        before = allocator.allocated_bytes
        reserved = reserved_after(graph, stored, allocator, steps=4)
        assert allocator.allocated_bytes == before  # a step gives back all that it asked for
        assert reserved[-2] == reserved[-1] == allocator.peak_reserved_bytes
        assert reserved[-1] >= simulator.simulate(stored).peak_bytes - graph.resident_bytes + before
        after[name] = reserved[-1]
    assert after["evicted"] < after["kept"]


def test_what_is_reserved_either_way_counts_the_blocks_of_libraries_once() -> None:
    graph = transformer()
    stored = Simulator(graph).close(())
    alone = CachingAllocator()
    settled = max(reserved_after(graph, stored, allocator_before_step(graph, alone)))
    default, expandable = reserved_either_way(graph, stored)
    assert default == settled and expandable % (2 << 20) == 0
    beside = replace(graph, resident_bytes=graph.resident_bytes + (64 << 20))
    assert reserved_either_way(beside, stored, (32 << 20, 32 << 20))[0] == default + (64 << 20)


def test_a_step_that_does_not_fit_says_so() -> None:
    graph = transformer()
    with pytest.raises(MemoryError, match="do not fit"):
        allocator = CachingAllocator(capacity=plain(graph).peak_bytes // 2)
        reserved_after(graph, Simulator(graph).close(()), allocator)
