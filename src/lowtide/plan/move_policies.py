"""The policies that only move: offload, compress, partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.plan.blocks import entering_blocks, full_stored
from lowtide.plan.build import make_plan
from lowtide.plan.decisions import Chain, Compress, Moving, Offload, Shard
from lowtide.plan.feasible import close
from lowtide.plan.moves import (
    default_window,
    dtypes_of,
    fitting_codec,
    least_count,
    lossless_codec,
    movable,
    moved_of,
)
from lowtide.plan.plan import Plan
from lowtide.plan.simulate import Simulator
from lowtide.plan.supply import Codec, supply
from lowtide.plan.traffic import Links, ahead_bytes


def fewest(
    sim: Simulator, stored: frozenset[int], order: Sequence[int], decision: Moving, budget: int, window: int
) -> int | None:
    """How many of ``order``, from its beginning, have to move so that the peak is within ``budget``; ``None``
    when all of them do not do.
    """

    def fits(count: int) -> bool:
        chosen = dict.fromkeys(order[:count], decision)
        moving = sim.moving(moved_of(sim, chosen), window) if chosen else sim
        return moving.simulate(stored - chosen.keys()).peak_bytes <= budget

    return least_count(len(order), fits)


def offload_policy(
    decision: Offload, min_bytes: int, window_bytes: int | None, links: Links | None, slab: bool | None
) -> Callable[..., Plan]:
    """See `lowtide.plan.policies.offload`."""

    def offload(graph: StepGraph, budget: int | None = None) -> Plan:
        sim = Simulator(graph)
        order = movable(sim, min_bytes)
        window = window_bytes or default_window(sim, order)
        everything = close(graph, sim.droppable, sim)
        if budget is None:
            sizes = [sim.value_bytes[v] for v in order]
            count, tail = len(order), 0
            while count and tail + sizes[count - 1] <= window:  # backward asks for the last at once
                count -= 1
                tail += sizes[count]
        else:
            found = fewest(sim, everything, order, decision, budget, window)
            count = len(order) if found is None else found
        moves: dict[int, Moving] = dict.fromkeys(order[:count], decision)
        return make_plan(
            graph,
            stored=everything,
            policy="offload",
            budget=budget,
            simulator=sim,
            moves=moves,
            window_bytes=window,
            links=links,
            slab=slab,
        )

    return offload


def compress_policy(
    codec: str | Codec, min_bytes: int, then: Offload | None, everywhere: bool
) -> Callable[..., Plan]:
    """See `lowtide.plan.policies.compress`."""
    own = () if isinstance(codec, str) else (codec,)
    name = codec if isinstance(codec, str) else codec.name
    if name != "auto":
        supply().codec_facts(name, own)

    def compress(graph: StepGraph, budget: int | None = None) -> Plan:
        sim = Simulator(graph)
        dtypes = dtypes_of(sim)
        bounded = (lambda value: "") if name == "auto" else fitting_codec(sim, name, own, everywhere)
        moves: dict[int, Moving] = {}
        for value in movable(sim, min_bytes):
            chosen = lossless_codec(sim, value, dtypes[value]) or bounded(value)
            if not chosen:
                continue
            first = Compress(chosen)
            (seen,) = moved_of(sim, {value: first}, codecs=own)
            if seen.encoded_bytes < 0.95 * seen.bytes:
                moves[value] = Chain(first, then) if then is not None else first
        stored = close(graph, sim.droppable, sim)
        return make_plan(
            graph, stored=stored, policy="compress", budget=budget, simulator=sim, moves=moves, codecs=own
        )

    return compress


def partition_policy(
    decision: Shard, values: str, min_bytes: int, then: Offload | None, slab: bool | None
) -> Callable[..., Plan]:
    """See `lowtide.plan.policies.partition`."""
    if values not in ("checkpoints", "all"):
        raise PlanError(f"partition(values={values!r}): give 'checkpoints' or 'all'")

    def partition(graph: StepGraph, budget: int | None = None) -> Plan:
        sim = Simulator(graph)
        stored = close(graph, full_stored(graph, sim) if values == "checkpoints" else sim.droppable, sim)
        may = entering_blocks(sim) if values == "checkpoints" else set(movable(sim))
        chosen = [
            v for v in sorted(stored & may) if sim.value_bytes[v] >= min_bytes and graph.values[v].storable
        ]
        moves: dict[int, Moving] = {
            v: Chain(decision, then) if then is not None else decision for v in chosen
        }
        if not moves:
            raise BudgetError(
                f"partition finds nothing of {min_bytes:,} bytes or more to shard: lower min_bytes=, or use "
                "the policy 'full'"
            )
        # the next while one is in use
        window = max(2 * ahead_bytes(m.decision, m.bytes, m.encoded_bytes) for m in moved_of(sim, moves))
        wanted = True if slab is None and budget is None else slab
        return make_plan(
            graph,
            stored=stored,
            policy="partition",
            budget=budget,
            simulator=sim,
            moves=moves,
            window_bytes=window,
            slab=wanted,
        )

    return partition
