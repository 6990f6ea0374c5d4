"""Kept values in the slab: which can be written there, and a plan of any policy with its kept values in one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.errors import BudgetError
from lowtide.graph import Operation, StepGraph
from lowtide.plan.plan import Place, Plan

if TYPE_CHECKING:
    from lowtide.plan.policies import Policy
    from lowtide.plan.simulate import Simulator
    from lowtide.store.codec import Codec

LEAST_BYTES = 4096
"""Smaller values stay where their operation puts them: what it takes to place one is the same for all sizes."""

_RESIZE = ("aten.resize_", "aten.set_")

_TRIES = 8
"""How often a policy is asked for a plan with less room, before its least is taken."""


def placeable(sim: Simulator, stored: Collection[int]) -> dict[int, tuple[int, int]]:
    """Storages of ``stored`` values that can be written into memory that is given -> (the operation's number in the forward, which of its results).

    What the step's caller can hold on to is not among them: it would have to stand twice from the second step on.
    """
    from lowtide.into import into_of, overload

    graph = sim.graph
    device = graph.device.partition(":")[0]
    step = {op.index: k for k, op in enumerate(op for op in graph.operations if op.phase == "forward")}
    excluded = {*graph.outputs, *graph.withheld_storages(), *_resized(graph)}
    found: dict[int, tuple[int, int]] = {}
    for value in sorted(stored):
        storage = graph.storages[sim.storage_of[value]]
        if storage.producer not in step or storage.kind != "forward" or storage.id in excluded or storage.bytes < LEAST_BYTES:
            continue
        op = graph.operations[storage.producer]
        func = overload(op.name)
        into = into_of(func, device) if func is not None else None
        fresh = fresh_storages(graph, op)
        if into is not None and len(into.names) == len(fresh):
            found[storage.id] = (step[op.index], fresh.index(storage.id))
    return found


def _resized(graph: StepGraph) -> set[int]:
    """Storages whose size the program changes, which memory that was given to an operation does not allow."""
    found = {s.id for s in graph.storages} - {v.storage for v in graph.values if v.storable}
    for op in graph.operations:
        if op.name.startswith(_RESIZE):
            found.update(graph.values[v].storage for v in (*op.reads, *op.writes))
    return found


def fresh_storages(graph: StepGraph, op: Operation) -> list[int]:
    """The storages that an operation allocates for what it writes, in the order of its results."""
    return [
        s for s in (graph.values[w].storage for w in op.writes if graph.values[w].version == 0) if graph.storages[s].producer == op.index
    ]


def placed_storages(graph: StepGraph, plan: Plan) -> frozenset[int]:
    """The storages that a plan's places are for."""
    forward = [op for op in graph.operations if op.phase == "forward"]
    return frozenset(fresh_storages(graph, forward[place.step])[place.output] for place in plan.places)


def place_rows(graph: StepGraph, places: Mapping[int, tuple[int, int]], offsets: Mapping[int, int]) -> tuple[Place, ...]:
    """The plan's places, in the order of the forward."""
    rows = [Place(*places[storage], graph.storages[storage].bytes, start) for storage, start in offsets.items()]
    return tuple(sorted(rows, key=lambda row: (row.step, row.output)))


def with_kept(graph: StepGraph, plan: Plan, codecs: Sequence[Codec] = ()) -> Plan:
    """The same decisions with kept values in the slab, whatever the budget: the peak is what it comes to. Times stay as they were predicted."""
    from lowtide.plan.build import make_plan

    moves = {move.value: move.decision for move in plan.moves}
    found = make_plan(
        graph,
        stored=plan.stored,
        policy=plan.policy,
        bound=False,
        notes=plan.notes,
        moves=moves,
        window_bytes=plan.window_bytes,
        codecs=codecs,
        slab="kept",
    )
    return replace(
        found,
        notes=plan.notes,
        predicted_extra_seconds=plan.predicted_extra_seconds,
        transfer_seconds=plan.transfer_seconds,
        crowding_seconds=plan.crowding_seconds,
        bound_extra_seconds=plan.bound_extra_seconds,
        bound_peak_bytes=plan.bound_peak_bytes,
    )


def in_slab_policy(policy: str | Policy, codecs: Sequence[Codec]) -> Policy:
    """See `lowtide.plan.policies.in_slab`."""
    from lowtide.plan import make, resolve

    resolve(policy)

    def in_slab(graph: StepGraph, budget: int | None = None) -> Plan:
        target, found = budget, None
        for _ in range(_TRIES):
            try:
                found = with_kept(graph, make(graph, target, policy), codecs)
            except BudgetError as error:
                if budget is None or error.smallest_bytes is None:
                    raise
                found = with_kept(graph, make(graph, error.smallest_bytes, policy), codecs)
                target = None  # there is nothing below
            if budget is None or found.predicted_peak_bytes <= budget:
                return replace(found, budget_bytes=budget)
            if target is None:
                break
            target = max(1, target - (found.predicted_peak_bytes - budget))
        assert found is not None and budget is not None
        raise BudgetError(
            f"the policy with its kept values in a slab needs {found.predicted_peak_bytes:,} bytes, the budget is {budget:,}.",
            found.predicted_peak_bytes,
            "Give a larger budget, or leave kept values where their operations put them.",
        )

    return in_slab
