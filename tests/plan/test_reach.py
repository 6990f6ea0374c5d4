"""What brings given-up values back: the compiled sweeps say what those in Python say."""

from __future__ import annotations

import random

import pytest

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan import reach
from lowtide.plan.build import close
from lowtide.plan.simulate import Simulator

from .random_graphs import random_graph, with_unasked
from .synthetic import transformer


def found(graph: StepGraph, seed: int) -> list[object]:
    """What sets of stored values are closed to, and what they and what was asked for take."""
    sim = Simulator(graph)
    source = random.Random(seed)
    answers: list[object] = []
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        wish = frozenset(v.id for v in graph.values if v.producer is not None and source.random() < share)
        closed = close(graph, wish, sim)
        answers.append(closed)
        for stored in (closed, wish):
            try:
                simulation = sim.simulate(stored)
            except PlanError as error:
                answers.append(str(error))
            else:
                answers.append(
                    (
                        simulation.replayed,
                        simulation.top_bytes.tolist(),
                        simulation.extra_seconds,
                        simulation.held_until,
                    )
                )
                answers.append(sim.least_at(stored, simulation.peak_event))
    return answers


@pytest.mark.skipif(reach._library() is None, reason="there is no C++ compiler")
def test_compiled_sweeps_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [random_graph(seed, operations=12) for seed in range(40)]
    graphs += [with_unasked(graph, 5) for graph in graphs[:10]]
    graphs.append(transformer(layers=2, tokens=16, hidden=16))
    for seed, graph in enumerate(graphs):
        monkeypatch.setattr(reach, "_WORTH_A_CALL", 0)
        compiled = found(graph, seed)
        monkeypatch.setattr(reach, "_WORTH_A_CALL", 1 << 60)
        assert compiled == found(graph, seed)


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
