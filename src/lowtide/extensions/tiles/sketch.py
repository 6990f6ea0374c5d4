"""A step with modules in pieces, read off the step without: no further trace.

In: a step graph, and in how many pieces which modules would run. Out: the same operations, with a piece's
share of the bytes that live inside of these modules. What enters and leaves a module keeps its size, as in
tiles. The time of the pieces is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from lowtide.graph import Operation, StepGraph
from lowtide.plan.simulate.holders import OF_THE_LOSS
from lowtide.remedies import LOSS
from lowtide.words import by_members, outward

_PRODUCT = "mm."
"""In the names of products of matrices, which make other tensors of logits than logits."""


def in_pieces(graph: StepGraph, pieces: Mapping[str, int], heads: Collection[str] = ()) -> StepGraph:
    """The step with modules in pieces.

    Args:
        graph: the step.
        pieces: by kind of module (``h.#.mlp``), and of `LOSS`.
        heads: names of the modules that make logits.
    """
    inside = [_instance(op, pieces) for op in graph.operations]
    touched: dict[int, set[tuple[str, str]]] = {}
    for op, instance in zip(graph.operations, inside, strict=True):
        for value in (*op.reads, *op.writes):
            touched.setdefault(graph.values[value].storage, set()).add(instance)
    freed = {event.index for event in graph.events if event.kind == "free"}
    parts = dict.fromkeys(_logits(graph, heads), pieces[LOSS]) if LOSS in pieces else {}
    for storage in graph.storages:
        # what is there before or behind the step, gradients among it, is no token's
        if storage.producer is not None and storage.id in freed and len(touched.get(storage.id, ())) == 1:
            ((kind, _),) = touched[storage.id]
            parts.setdefault(storage.id, pieces.get(kind, 1))

    def smaller(op: Operation) -> Operation:
        own = (parts.get(graph.values[value].storage, 1) for value in (*op.reads, *op.writes))
        most = max((pieces.get(inside[op.index][0], 1), *own))
        return replace(op, scratch_bytes=-(-op.scratch_bytes // most))

    storages = (replace(one, bytes=-(-one.bytes // parts.get(one.id, 1))) for one in graph.storages)
    return graph.with_operations(smaller, storages=tuple(storages))


def _instance(op: Operation, kinds: Mapping[str, int]) -> tuple[str, str]:
    """The kind among these, and the module of it, in which an operation ran; empty where in none."""
    for name in outward(op.module):
        if (kind := by_members(name)[0]) in kinds:
            return kind, name
    return "", ""


def _logits(graph: StepGraph, heads: Collection[str]) -> set[int]:
    """Storages of logits and of their gradients: what the modules that make logits and the operations of a
    token loss read and write, and what is cast, scaled or copied before and after.
    """

    def sizes(op: Operation) -> dict[int, int]:
        values = [graph.values[value] for value in (*op.reads, *op.writes)]
        return {
            value.storage: math.prod(value.shape)
            for value in values
            if graph.storages[value.storage].producer is not None
        }

    of_loss = [sizes(op) for op in graph.operations if op.module in heads or OF_THE_LOSS.search(op.name)]
    least = max((size for one in of_loss for size in one.values()), default=0) // 2
    found = {storage for one in of_loss for storage, size in one.items() if size > least}
    before = -1
    while len(found) > before:
        before = len(found)
        for op in graph.operations:
            if _PRODUCT not in op.name and not found.isdisjoint(near := sizes(op)):
                found |= {storage for storage, size in near.items() if size > least}
    return found
