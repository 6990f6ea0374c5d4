"""A step's fingerprint without sizes tells programs apart, in every process alike."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from random_graphs import random_graph
from synthetic import transformer

from lowtide.graph import StepGraph


def test_digests_tell_programs_apart_and_not_their_sizes_and_times():
    graph = random_graph(3)
    larger = tuple(replace(s, bytes=2 * s.bytes) for s in graph.storages)
    other = replace(graph, plain_seconds=9.0, storages=larger)
    assert graph.fingerprint(sizes=False) == other.fingerprint(sizes=False)
    operations = (replace(graph.operations[0], name="another"), *graph.operations[1:])
    others = [replace(graph, operations=operations), random_graph(4)]
    assert len({g.fingerprint(sizes=False) for g in (graph, *others)}) == 3


def test_digests_are_the_same_in_every_process():
    code = "from synthetic import transformer; print(transformer(1).fingerprint(sizes=False))"
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert told.stdout.strip() == transformer(1).fingerprint(sizes=False)


def test_a_graph_is_read_from_its_dictionary() -> None:
    with pytest.raises(ValueError, match=r"json\.loads it first"):
        StepGraph.from_json("{}")  # type: ignore[arg-type]


LAYERS = 4


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return transformer(LAYERS)


def test_a_graph_prints_as_one_line(graph: StepGraph):
    assert (
        repr(graph).startswith(f"StepGraph({len(graph.operations):,} operations, ") and len(repr(graph)) < 300
    )
