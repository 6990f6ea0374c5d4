"""Blocks of a model, and what checkpointing each of them, or stretches of equal size, stores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan.simulate.simulator import Simulator
from lowtide.plan.split.stages import Stages, find_stages


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
    """Names of the blocks: the outermost numbered modules, or the top-level modules where nothing is
    numbered.
    """
    names = dict.fromkeys(block_of(op.module) for op in graph.operations if op.phase == "forward")
    names.pop("", None)
    if not names:
        names = dict.fromkeys(
            op.module.split(".")[0] for op in graph.operations if op.phase == "forward" and op.module
        )
    return list(names)


def regions_of(graph: StepGraph, modules: Iterable[str]) -> dict[int, int]:
    """Forward operation -> number of the region (a module, given by name) that it lies in.

    Raises:
        PlanError: no operation ran in one of the modules.
    """
    names = list(modules)
    outermost = [n for n in names if not any(n != m and n.startswith(m + ".") for m in names)]
    region: dict[int, int] = {}
    for op in graph.operations:
        for number, name in enumerate(outermost if op.phase == "forward" else ()):
            if name in ("", op.module) or op.module.startswith(name + "."):
                region[op.index] = number
                break
    missing = [n for number, n in enumerate(outermost) if number not in region.values()]
    if missing:
        known = sorted({op.module for op in graph.operations if op.phase == "forward" and op.module})
        raise PlanError(
            f"no operation ran in module {missing[0]!r}; modules of this step: "
            f"{', '.join(known[:12])}{' ...' if len(known) > 12 else ''}"
        )
    return region


def region_stored(sim: Simulator, region: dict[int, int]) -> frozenset[int]:
    """What stays when in every region only what enters it is kept: everything that is not made and used
    within one region.

    Values that leave their region stay because they enter another, or what follows.
    """
    graph = sim.graph
    kept: set[int] = set()
    for value in graph.values:
        if value.producer is None or not value.storable:
            continue
        home = region.get(value.producer, -1)
        if home >= 0:
            readers = all(region.get(i, -1) == home for i in sim.readers[value.id])
            if readers and all(
                region.get(sim.packed_after[t], -1) == home for t in sim.saved_of.get(value.id, ())
            ):
                continue
        kept.add(value.id)
    return frozenset(kept)


def full_stored(sim: Simulator, blocks: Sequence[str] | None = None) -> frozenset[int]:
    """The values that `full` stores."""
    names = blocks if blocks is not None else default_blocks(sim.graph)
    if not names:
        raise PlanError(
            "this step has no modules to take for blocks: name them with blocks=, or use the policy 'optimal'"
        )
    return region_stored(sim, regions_of(sim.graph, names))


def sqrt_stored(sim: Simulator, segments: int | None = None, stages: Stages | None = None) -> frozenset[int]:
    """The values that `sqrt` stores; ``stages`` are the step's, where they are known."""
    stages = stages or find_stages(sim)
    count = segments or round(math.sqrt(max(len(default_blocks(sim.graph)), 1)))
    saved = [0] * len(stages)
    for value in sim.droppable:
        if value in stages.stage_of:
            saved[stages.stage_of[value]] += sim.value_bytes[value]
    total = max(1, sum(saved))
    region: dict[int, int] = {}
    so_far = 0
    for k in range(len(stages)):
        number = min(count - 1, so_far * count // total)
        region.update((index, number) for index in stages.operations(k, k + 1))
        so_far += saved[k]
    return region_stored(sim, region) | stages.everywhere


def entering_blocks(sim: Simulator) -> frozenset[int]:
    """The values that enter a block: made outside it, read in it."""
    region = regions_of(sim.graph, default_blocks(sim.graph))
    return frozenset(
        v.id
        for v in sim.graph.values
        if any(
            region.get(i, -1) >= 0 and region.get(sim.producer[v.id], -2) != region[i]
            for i in sim.readers[v.id]
        )
    )
