"""Blocks are found by the names of modules; segments have about equal saved bytes."""

from __future__ import annotations

import pytest
from synthetic import residual_network, transformer

from lowtide.errors import PlanError
from lowtide.plan.blocks import Segments, blocks_of, default_blocks, entering_blocks, full_stored, sqrt_stored
from lowtide.plan.simulate import Simulator


def test_the_outermost_numbered_modules_are_blocks() -> None:
    graph = transformer(3)
    assert default_blocks(graph) == ["h.0", "h.1", "h.2"]
    block = blocks_of(graph, default_blocks(graph))
    assert all(graph.operations[index].module.split(".")[1] == str(number) for index, number in block.items())


def test_a_block_within_another_is_part_of_it() -> None:
    graph = transformer(2)
    assert blocks_of(graph, ["h.0", "h.0.mlp"]) == blocks_of(graph, ["h.0"])
    with pytest.raises(PlanError, match=r"h\.7"):
        blocks_of(graph, ["h.7"])


def test_what_enters_a_block_stays_and_what_is_made_and_used_within_goes() -> None:
    sim = Simulator(transformer(3))
    stored, entering = full_stored(sim), entering_blocks(sim)
    block = blocks_of(sim.graph, default_blocks(sim.graph))
    for value in sim.droppable:
        home = block.get(sim.producer[value], -1)
        assert (value in stored) >= (value in entering or home < 0), sim.describe(value)
    assert not stored.issuperset(sim.droppable)


def test_more_segments_store_more_and_one_stores_no_border() -> None:
    sim = Simulator(residual_network(8))
    segments = Segments(sim)
    held = [sum(sim.value_bytes[v] for v in segments.stored(count)) for count in (1, 2, 4, 8)]
    assert held == sorted(set(held))
    assert sqrt_stored(sim, 4) == segments.stored(4)
