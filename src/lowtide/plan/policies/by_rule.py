"""The policies that follow a rule: they recompute per block, by square root or by operation."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lowtide.errors import PlanError, expect, is_count
from lowtide.graph import Operation, StepGraph
from lowtide.plan.blocks import block_of, full_stored, sqrt_stored
from lowtide.plan.data import Plan
from lowtide.plan.policies.build import Policy, make_plan
from lowtide.plan.simulate.simulator import Simulator, simulator_of

_SOFTMAX = re.compile(r"(^|[.:])_?(safe_)?softmax(\.|$)")
_BATCHED = re.compile(r"(^|[.:])(bmm|baddbmm|matmul|einsum)(\.|$)")
_PRODUCT = re.compile(r"(^|[.:])(mm|addmm|bmm|baddbmm|matmul|linear|einsum|convolution|_scaled_mm)(\.|$)")
_MOST_AROUND = 40
"""Operations that belong to a softmax, at most, in either direction."""

_FUSED = re.compile(r"scaled_dot_product|flash_attention|efficient_attention")


def keep_all() -> Policy:
    """Keep all saved tensors, as PyTorch does without lowtide. Checkpointing scopes recompute theirs."""
    return _policy("keep_all", lambda sim: sim.all_stored)


def full(blocks: Sequence[str] | None = None) -> Policy:
    """Keep the inputs of each block, like ``torch.utils.checkpoint`` on every block.

    Args:
        blocks: qualified names of the blocks; by default the outermost numbered children
            (``transformer.h.0``, ``layer1.2``). If no module is numbered, a limited part of a larger model is
            one block, and the top-level modules of a whole model are blocks.
    """
    _check_names("full(blocks=)", blocks, "names of modules")
    return _policy("full", lambda sim: full_stored(sim, blocks))


def scope(modules: Sequence[str]) -> Policy:
    """Recompute the saved tensors of the marked regions, and keep their inputs and all other tensors.

    Args:
        modules: qualified names of modules. Each is a region; a nested module belongs to the outermost
            region.
    """
    _check_names("scope(modules=)", modules, "names of modules")
    return _policy("scope", lambda sim: full_stored(sim, modules))


def sqrt(segments: int | None = None) -> Policy:
    """Chen et al. (arXiv 1604.06174, section 4.1): keep only the borders of about sqrt(n) segments of equal
    saved bytes.

    Args:
        segments: how many segments; by default the square root of the number of blocks.
    """
    given = segments is None or is_count(segments, 1)
    expect(given, "sqrt(segments=)", segments, "a whole number, 1 or more")
    return _policy("sqrt", lambda sim: sqrt_stored(sim, segments))


def selective(*, recompute_ops: Sequence[str] | None = None, save_ops: Sequence[str] | None = None) -> Policy:
    """Recompute large tensors that are cheap to compute.

    Without arguments it recomputes Megatron's core attention (arXiv 2205.05198, section 5): all operations
    between q, k, v and the output projection. If attention is one fused operation, that operation is
    replayed.

    Args:
        recompute_ops: recompute the results of these operations (``aten.gelu``, ``aten._softmax.default``,
            ``gelu``), and keep all other tensors.
        save_ops: in each block keep the inputs of the block and the results of these operations, and
            recompute all other tensors.
    """
    for option, names in (("recompute_ops", recompute_ops), ("save_ops", save_ops)):
        _check_names(f"selective({option}=)", names, "names of operations")
    if recompute_ops is not None and save_ops is not None:
        raise PlanError("selective takes recompute_ops= or save_ops=, not both")
    if recompute_ops is not None:
        return _policy(
            "selective",
            lambda sim: evict_outputs(sim, _matching(sim, recompute_ops, "recompute_ops")),
        )
    if save_ops is not None:
        return _policy("selective", lambda sim: save_stored(sim, save_ops))
    return _policy("selective", attention_stored)


def _check_names(option: str, names: Any, what: str) -> None:
    listed = isinstance(names, Iterable) and not isinstance(names, str)
    listed = listed and all(isinstance(name, str) for name in names)
    allowed = f"[{names!r}]" if isinstance(names, str) else f"a list of {what}"
    expect(names is None or listed, option, names, allowed)


def _policy(name: str, choose: Callable[[Simulator], frozenset[int]]) -> Policy:
    def policy(graph: StepGraph, budget: int | None = None) -> Plan:
        sim = simulator_of(graph)
        return make_plan(graph, stored=choose(sim), policy=name, budget=budget, simulator=sim)

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


def _matching(sim: Simulator, names: Sequence[str], option: str) -> set[int]:
    forward = [op for op in sim.graph.operations if op.phase == "forward"]
    found = {op.index for op in forward if names_match(op, names)}
    for name in names:
        if not any(names_match(op, [name]) for op in forward):
            known = sorted({op.name for op in forward})
            raise PlanError(
                f"{option}: this step runs no operation {name!r}; it runs "
                f"{', '.join(known[:20])}{' ...' if len(known) > 20 else ''}"
            )
    return found


def evict_outputs(sim: Simulator, operations: set[int]) -> frozenset[int]:
    """The values that are stored when the outputs of ``operations`` are evicted, and all others stay."""
    return frozenset(
        v.id
        for v in sim.graph.values
        if v.storable and v.producer is not None and v.producer not in operations
    )


def save_stored(sim: Simulator, names: Sequence[str]) -> frozenset[int]:
    """The values that ``selective(save_ops=...)`` stores."""
    chosen = _matching(sim, names, "save_ops")
    return full_stored(sim) | {w for i in chosen for w in sim.graph.operations[i].writes if sim.storable[w]}


def attention_stored(sim: Simulator) -> frozenset[int]:
    """The values that `selective` stores by default: all but core attention's.

    Raises:
        PlanError: the step has no attention that this policy knows.
    """
    graph = sim.graph
    evicted: set[int] = set()
    for op in graph.operations:
        if op.phase != "forward":
            continue
        if _FUSED.search(op.name):
            below, readers = _around(sim, op, _readers(sim, op.writes), _PRODUCT)
            evicted |= {op.index} | (below if readers else set())
        elif _SOFTMAX.search(op.name):
            above, products = _around(sim, op, _makers(sim, op.reads), _BATCHED, up=True)
            below, readers = _around(sim, op, _readers(sim, op.writes), _BATCHED)
            if products and readers:
                masks = _makers(sim, [u for i in below for u in graph.operations[i].reads])
                late = {i for i in _around(sim, op, masks, _PRODUCT, up=True)[0] if i > op.index}
                evicted |= {op.index} | above | products | below | late
    if not evicted:
        raise PlanError(
            "selective found no attention (a softmax between two batched products, or a fused attention "
            "operation): name the operations with recompute_ops= or save_ops="
        )
    return evict_outputs(sim, evicted)


def _makers(sim: Simulator, values: Iterable[int]) -> list[int]:
    return [sim.producer[value] for value in values]


def _readers(sim: Simulator, values: Iterable[int]) -> list[int]:
    return [index for value in values for index in sim.readers[value]]


def _around(
    sim: Simulator, op: Operation, start: list[int], stop: re.Pattern[str], up: bool = False
) -> tuple[set[int], set[int]]:
    """Operations of the block of ``op`` from ``start`` on, down or ``up`` to the next products, and those
    products that ``stop`` names.
    """
    graph, here = sim.graph, block_of(op.module)
    found: set[int] = set()
    stops: set[int] = set()
    queue = deque(start)
    while queue and len(found) < _MOST_AROUND:
        index = queue.popleft()
        if index < 0 or index in found:
            continue
        near = graph.operations[index]
        inside = block_of(near.module) == here
        if stop.search(near.name) and (inside or not up):
            stops.add(index)
        elif inside and not _PRODUCT.search(near.name):
            found.add(index)
            queue.extend(_makers(sim, near.reads) if up else _readers(sim, near.writes))
    return found, stops
