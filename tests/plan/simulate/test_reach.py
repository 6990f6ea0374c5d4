"""What brings evicted values back: a refusal says what is missing."""

from __future__ import annotations

from random_graphs import random_graph

from lowtide.errors import PlanError
from lowtide.plan.simulate import Simulator


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
