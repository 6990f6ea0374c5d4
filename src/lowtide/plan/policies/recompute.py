"""The policies that recompute by a rule: per block, by square root, by operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from lowtide.errors import PlanError
from lowtide.graph import Operation, StepGraph
from lowtide.plan.data import Plan
from lowtide.plan.policies.build import Policy, make_plan
from lowtide.plan.simulate.simulator import Simulator
from lowtide.plan.split.blocks import block_of, full_stored, sqrt_stored

_SOFTMAX = re.compile(r"(^|[.:])_?(safe_)?softmax(\.|$)")
_BATCHED = re.compile(r"(^|[.:])(bmm|baddbmm|matmul|einsum)(\.|$)")
_PRODUCT = re.compile(r"(^|[.:])(mm|addmm|bmm|baddbmm|matmul|linear|einsum|convolution|_scaled_mm)(\.|$)")
_FUSED = re.compile(r"scaled_dot_product|flash_attention|efficient_attention")


def keep_all() -> Policy:
    """Keep everything, as PyTorch does without lowtide."""
    return _policy("keep_all", lambda graph, sim: frozenset(sim.droppable))


def full(blocks: Sequence[str] | None = None) -> Policy:
    """Per block, keep only what enters it, like ``torch.utils.checkpoint`` on every block.

    Args:
        blocks: qualified names of the blocks; by default the outermost numbered children
            (``transformer.h.0``, ``layer1.2``), or the top-level modules where nothing is numbered.
    """
    return _policy("full", lambda graph, sim: full_stored(graph, sim, blocks))


def scope(modules: Sequence[str]) -> Policy:
    """Keep only what enters the marked regions; everything outside them stays.

    Args:
        modules: qualified names of modules; each is a region of its own, nested names belong to the
            outermost.
    """
    return _policy("scope", lambda graph, sim: full_stored(graph, sim, modules))


def sqrt(segments: int | None = None) -> Policy:
    """Chen et al. (arXiv 1604.06174, section 4.1): keep only the borders of about sqrt(n) segments of equal
    saved bytes.

    Args:
        segments: how many segments; by default the square root of the number of blocks.
    """
    if segments is not None and segments < 1:
        raise PlanError(f"segments={segments}: give 1 or more")
    return _policy("sqrt", lambda graph, sim: sqrt_stored(graph, sim, segments))


def selective(*, recompute_ops: Sequence[str] | None = None, save_ops: Sequence[str] | None = None) -> Policy:
    """Recompute what is large and cheap.

    Without arguments: Megatron's core attention (arXiv 2205.05198, section 5): all between q, k, v and the
    output projection, softmax and dropout included. Where attention is one fused operation, its output is
    evicted and the operation replayed.

    Args:
        recompute_ops: evict what these operations make (``aten.gelu``, ``aten._softmax.default``,
            ``gelu``), keep the rest.
        save_ops: per block, keep only what these operations make and what enters the block, recompute the
            rest.
    """
    if recompute_ops is not None and save_ops is not None:
        raise PlanError("selective takes recompute_ops= or save_ops=, not both")
    if recompute_ops is not None:
        return _policy("selective", lambda graph, sim: recompute_stored(graph, sim, recompute_ops))
    if save_ops is not None:
        return _policy("selective", lambda graph, sim: save_stored(graph, sim, save_ops))
    return _policy("selective", attention_stored)


def _policy(name: str, choose: Callable[[StepGraph, Simulator], frozenset[int]]) -> Policy:
    def policy(graph: StepGraph, budget: int | None = None) -> Plan:
        sim = Simulator(graph)
        return make_plan(graph, stored=choose(graph, sim), policy=name, budget=budget, simulator=sim)

    policy.__name__ = policy.__qualname__ = name
    return policy


# ---- by operation --------------------------------------------------------------------------------


def names_match(op: Operation, names: Sequence[str]) -> bool:
    """Whether an operation goes by one of ``names``: its full name, without overload, or without namespace
    too.
    """
    packet = op.name.rsplit(".", 1)[0] if op.name.count(".") > 1 else op.name
    bare = packet.split(".", 1)[-1]
    return any(n in (op.name, packet, bare) for n in (name.replace("::", ".") for name in names))


def _matching(graph: StepGraph, names: Sequence[str], option: str) -> set[int]:
    found = {op.index for op in graph.operations if op.phase == "forward" and names_match(op, names)}
    for name in names:
        if not any(names_match(graph.operations[i], [name]) for i in found):
            known = sorted({op.name for op in graph.operations if op.phase == "forward"})
            raise PlanError(
                f"{option}: this step runs no operation {name!r}; it runs "
                f"{', '.join(known[:20])}{' ...' if len(known) > 20 else ''}"
            )
    return found


def evict_outputs(sim: Simulator, operations: set[int]) -> frozenset[int]:
    """What stays when the outputs of ``operations`` are evicted and replayed from everything else."""
    return frozenset(
        v.id
        for v in sim.graph.values
        if v.storable and v.producer is not None and v.producer not in operations
    )


def recompute_stored(graph: StepGraph, sim: Simulator, names: Sequence[str]) -> frozenset[int]:
    """The values that ``selective(recompute_ops=...)`` stores."""
    return evict_outputs(sim, _matching(graph, names, "recompute_ops"))


def save_stored(graph: StepGraph, sim: Simulator, names: Sequence[str]) -> frozenset[int]:
    """The values that ``selective(save_ops=...)`` stores."""
    chosen = _matching(graph, names, "save_ops")
    return full_stored(graph, sim) | {
        w for i in chosen for w in graph.operations[i].writes if graph.values[w].storable
    }


def attention_stored(graph: StepGraph, sim: Simulator) -> frozenset[int]:
    """The values that `selective` stores by default: all but core attention's.

    Raises:
        PlanError: the step has no attention that this policy knows.
    """
    given: set[int] = set()
    for op in graph.operations:
        if op.phase != "forward":
            continue
        if _FUSED.search(op.name):
            given |= {op.index} | _downstream(sim, op, _PRODUCT)[0]
        elif _SOFTMAX.search(op.name):
            above, start = _upstream(sim, op)
            below, stops = _downstream(sim, op, _BATCHED)
            if start and stops:
                given |= {op.index} | above | below | _beside(sim, op, below)
    if not given:
        raise PlanError(
            "selective found no attention (a softmax between two batched products, or a fused attention "
            "operation): name the operations with recompute_ops= or save_ops="
        )
    return evict_outputs(sim, given)


def _same_place(a: Operation, b: Operation) -> bool:
    return block_of(a.module) == block_of(b.module)


def _upstream(sim: Simulator, op: Operation) -> tuple[set[int], bool]:
    """Operations between the batched product above ``op`` and ``op``, that product included; whether there is
    one.
    """
    graph = sim.graph
    found: set[int] = set()
    product = False
    stack = [(u, 0) for u in op.reads]
    while stack:
        value, depth = stack.pop()
        index = sim.producer[value]
        if index < 0 or index in found or depth > 12:
            continue
        above = graph.operations[index]
        if _BATCHED.search(above.name) and _same_place(above, op):
            found.add(index)
            product = True
        elif not _PRODUCT.search(above.name) and _same_place(above, op):
            found.add(index)
            stack.extend((u, depth + 1) for u in above.reads)
    return found, product


def _beside(sim: Simulator, op: Operation, region: set[int]) -> set[int]:
    """What else the operations of ``region`` read that is made near ``op`` without a product: dropout
    masks.
    """
    graph = sim.graph
    found: set[int] = set()
    stack = [u for i in region for u in graph.operations[i].reads]
    while stack:
        index = sim.producer[stack.pop()]
        if index < 0 or index in found or index in region or index <= op.index:
            continue
        near = graph.operations[index]
        if _same_place(near, op) and not _PRODUCT.search(near.name):
            found.add(index)
            stack.extend(near.reads)
    return found


def _downstream(sim: Simulator, op: Operation, stop: re.Pattern[str]) -> tuple[set[int], bool]:
    """Operations between ``op`` and the next product, that one not included (its output is what leaves);
    whether there is one.
    """
    graph = sim.graph
    found: set[int] = set()
    product = False
    stack = list(op.writes)
    while stack:
        for index in sim.readers[stack.pop()]:
            below = graph.operations[index]
            if stop.search(below.name):
                product = True
            elif (
                index not in found
                and _same_place(below, op)
                and len(found) < 16
                and not _PRODUCT.search(below.name)
            ):
                found.add(index)
                stack.extend(below.writes)
    if not product:
        found.clear()
    return found, product
