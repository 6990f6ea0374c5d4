"""Searches of stages serve whoever plans the same stages again."""

from __future__ import annotations

from dataclasses import replace

from synthetic import residual_network, transformer

from lowtide.graph import StepGraph
from lowtide.plan.front import Known
from lowtide.plan.optimal import Planner
from lowtide.plan.simulate import plain


def stored(graph: StepGraph, known: Known, share: float = 0.6) -> frozenset[int]:
    peak = plain(graph).peak_bytes
    budget = graph.resident_bytes + int(share * (peak - graph.resident_bytes))
    return Planner(graph, known).solve(budget).stored


def test_other_budgets_and_resident_bytes_search_nothing_again():
    graph, known = transformer(4), Known()
    stored(graph, known)
    searched = known.searched
    assert searched
    heavier = replace(graph, resident_bytes=graph.resident_bytes + 12345)
    for other in (graph, heavier):
        for share in (0.6, 0.8):
            assert stored(other, known, share) == stored(other, Known(), share)
    assert known.searched == searched


def test_a_deeper_network_searches_only_what_is_new():
    known, alone = Known(), Known()
    stored(transformer(4), known)
    before = known.searched
    assert stored(transformer(6), known) == stored(transformer(6), alone)
    assert known.searched - before < alone.searched


def test_other_prices_and_other_content_are_searched():
    graph, known = transformer(4), Known()
    stored(graph, known)
    before = known.searched
    operations = tuple(replace(op, seconds=op.seconds * (1 + op.index % 3)) for op in graph.operations)
    dearer = replace(graph, operations=operations)
    assert stored(dearer, known) == stored(dearer, Known())
    assert known.searched > before
    before = known.searched
    assert stored(residual_network(4), known) == stored(residual_network(4), Known())
    assert known.searched > before


def test_searches_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr("lowtide.plan.front._MOST_FRONTS", 3)
    monkeypatch.setattr("lowtide.plan.front._MOST_BYTES", 1)
    known = Known()
    stored(transformer(4), known)
    assert len(known._fronts) <= 3 and len(known._walked) == 1
