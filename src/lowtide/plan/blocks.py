"""Blocks of a model, as its modules' names tell, and segments of equal size: what checkpointing them stores.

In: a step, perhaps its `Simulator`. Out: names of blocks, the block that each operation lies in, and sets of
values to store.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan.simulate.simulator import Simulator


def block_of(module: str) -> str:
    """The block that a module lies in: its path up to the first number, or empty.

    >>> block_of("transformer.h.3.attn.c_proj")
    'transformer.h.3'
    """
    parts = module.split(".")
    for k, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: k + 1])
    return ""


def default_blocks(graph: StepGraph) -> list[str]:
    """Names of the blocks: the outermost numbered modules. Where nothing is numbered it is all one block, the
    empty name, if the step is a part of a larger one, else the top-level modules.
    """
    names = dict.fromkeys(block_of(op.module) for op in graph.operations if op.phase == "forward")
    names.pop("", None)
    if not names and _hands_a_gradient_on(graph):
        return [""]
    if not names:
        names = dict.fromkeys(
            op.module.split(".")[0] for op in graph.operations if op.phase == "forward" and op.module
        )
    return list(names)


def _hands_a_gradient_on(graph: StepGraph) -> bool:
    """Whether backward ends in the gradient of an input, which what ran before the step reads: in a value of
    an input's shape that is no parameter's gradient, and that nothing in the step reads.
    """
    read = {value for operation in graph.operations for value in operation.reads}
    inputs = {
        (value.shape, value.dtype) for value in graph.values if graph.storages[value.storage].kind == "input"
    }
    made = (id for operation in graph.operations if operation.phase == "backward" for id in operation.writes)
    last = (graph.values[id] for id in made if id not in read)
    return any((v.shape, v.dtype) in inputs and not graph.storages[v.storage].name for v in last)


def blocks_of(graph: StepGraph, modules: Iterable[str]) -> dict[int, int]:
    """Forward operation -> number of the block (a module, given by name) that it lies in.

    Raises:
        PlanError: no operation ran in one of the modules.
    """
    names = list(modules)
    outermost = [n for n in names if not any(n != m and n.startswith(m + ".") for m in names)]
    block: dict[int, int] = {}
    for op in graph.operations:
        for number, name in enumerate(outermost if op.phase == "forward" else ()):
            if name in ("", op.module) or op.module.startswith(name + "."):
                block[op.index] = number
                break
    missing = [n for number, n in enumerate(outermost) if number not in block.values()]
    if missing:
        known = sorted({op.module for op in graph.operations if op.phase == "forward" and op.module})
        raise PlanError(
            f"no operation ran in module {missing[0]!r}; modules of this step: "
            f"{', '.join(known[:12])}{' ...' if len(known) > 12 else ''}"
        )
    return block


def block_stored(sim: Simulator, block: dict[int, int]) -> frozenset[int]:
    """The values that are stored when every block stores only what enters it: all values that are not made
    and used within one block.

    Values that leave their block stay because they enter another, or what follows.
    """
    graph = sim.graph
    stored: set[int] = set()
    for value in graph.values:
        if value.producer is None or not value.storable:
            continue
        home = block.get(value.producer, -1)
        if home >= 0:
            readers = all(block.get(i, -1) == home for i in sim.readers[value.id])
            if readers and all(
                block.get(sim.packed_after[t], -1) == home for t in sim.saved_of.get(value.id, ())
            ):
                continue
        stored.add(value.id)
    return frozenset(stored)


def full_stored(sim: Simulator, blocks: Sequence[str] | None = None) -> frozenset[int]:
    """The values that `full` stores."""
    names = blocks if blocks is not None else default_blocks(sim.graph)
    if not names:
        raise PlanError(
            "this step has no modules to take for blocks: name them with blocks=, or use the policy 'optimal'"
        )
    return block_stored(sim, blocks_of(sim.graph, names))


class Segments:
    """Segments of about equal saved bytes, cut where few bytes cross.

    Args:
        sim: the step.
    """

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.operations = [op.index for op in sim.graph.operations if op.phase == "forward"]
        position = {index: at for at, index in enumerate(self.operations)}
        saved = np.zeros(len(self.operations) + 1, dtype=np.int64)
        crossing = np.zeros((len(self.operations) + 1, 2), dtype=np.int64)
        for value, producer in enumerate(sim.producer):
            if producer not in position:
                continue
            readers = [*sim.readers[value], *(sim.packed_after[t] for t in sim.saved_of.get(value, ()))]
            size, born = sim.value_bytes[value], position[producer]
            last = max((position[index] for index in readers if index in position), default=born)
            saved[born] += size if value in sim.saved_of else 0
            crossing[born] += size, not sim.storable[value]
            crossing[last] -= size, not sim.storable[value]
        self._saved = np.cumsum(saved).tolist()
        self._crossing: list[list[int]] = np.cumsum(crossing, axis=0)[:, ::-1].tolist()
        """position -> values that cross to the next operation and cannot be stored, bytes that cross"""

    def stored(self, count: int) -> frozenset[int]:
        """The values that are stored when of ``count`` segments only the borders are kept."""
        total, saved = self._saved[-1], self._saved

        def place(share: float) -> int:
            return bisect_left(saved, share * total / count, hi=len(self.operations))

        cuts: list[int] = []
        for k in range(1, count if total else 1):
            near = range(place(k - 0.3), min(place(k + 0.3) + 1, len(self.operations)))
            cuts.append(min(near, key=lambda at: (*self._crossing[at], abs(saved[at] - k * total / count))))
        block = {index: bisect_left(cuts, at) for at, index in enumerate(self.operations)}
        return block_stored(self.sim, block)


def sqrt_stored(sim: Simulator, segments: int | None = None) -> frozenset[int]:
    """The values that `sqrt` stores."""
    return Segments(sim).stored(segments or round(math.sqrt(max(len(default_blocks(sim.graph)), 1))))


def entering_blocks(sim: Simulator) -> frozenset[int]:
    """The values that enter a block: made outside it, read in it."""
    block = blocks_of(sim.graph, default_blocks(sim.graph))
    return frozenset(
        v.id
        for v in sim.graph.values
        if any(
            block.get(i, -1) >= 0 and block.get(sim.producer[v.id], -2) != block[i] for i in sim.readers[v.id]
        )
    )
