"""From a wish to a plan: make a set of stored values feasible, simulate it, bound it, and write the table.

Every policy ends here, a user's own included: decide which values stay, call `make_plan`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from lowtide.errors import BudgetError, PlanError, expect, is_count
from lowtide.graph import StepGraph
from lowtide.plan.bound import Bound, Relaxation
from lowtide.plan.data import Keep, Links, ModuleRow, Move, Moving, Offload, Plan, ProgramStep, Recompute
from lowtide.plan.layout import with_slab
from lowtide.plan.moves import Codec, close_with_moves, move_of, refuse_moves, simulated_moves
from lowtide.plan.simulate.index import replay_set
from lowtide.plan.simulate.simulator import Simulation, Simulator, simulator_of


class Policy(Protocol):
    """The signature of every policy."""

    def __call__(self, graph: StepGraph, budget: int | None = None) -> Plan:
        """The plan for ``graph``; a policy that cannot meet ``budget`` raises `BudgetError`."""
        ...


def make_plan(
    graph: StepGraph,
    *,
    stored: Collection[int],
    policy: str = "own",
    budget: int | None = None,
    bound: Bound | None = None,
    notes: tuple[str, ...] = (),
    simulator: Simulator | None = None,
    moves: Mapping[int, Moving] | None = None,
    window_bytes: int = 0,
    links: Links | None = None,
    codecs: Sequence[Codec] = (),
    slab: bool | None = None,
) -> Plan:
    """The plan that stores ``stored``: closed to a feasible set, simulated, bounded and with its table.

    Args:
        graph: the step.
        stored: ids of the values that stay; every other droppable saved value is evicted where that is
            possible.
        policy: the name that the plan carries.
        budget: the most live bytes allowed, or ``None``.
        bound: lower bounds that are known already; without them they are computed (a linear program: seconds
            on large graphs), where nothing moves.
        notes: anything worth telling.
        simulator: of ``graph``, where one was made already.
        moves: value id -> where it goes, for values that wait elsewhere or in another form.
        window_bytes: the most bytes that wait for their copies out at one time, and the most that are fetched
            ahead; 0 for as much as the largest moved value.
        links: how fast the tiers are; without it transfers take no time.
        codecs: codecs of the user's own that ``moves`` name.
        slab: whether moved values come back into a slab on the device that is allocated once
            (docs/stores.md); ``None`` for where the budget allows it, or without a budget where it
            costs nothing.

    Raises:
        BudgetError: the plan's peak is above the budget.
        PlanError: a value cannot be moved, or an argument is something else.
    """
    if slab not in (None, True, False):
        raise PlanError(f"slab={slab!r}: give True, False, or None for where the budget has room for it")
    expect(isinstance(graph, StepGraph), "make_plan(graph=)", graph, "a StepGraph, as lowtide.trace returns")
    ids, most = isinstance(stored, Collection) and not isinstance(stored, str), len(graph.values)
    known = ids and all(is_count(value) and int(value) < most for value in stored)
    expect(known, "make_plan(stored=)", stored, f"the ids of values of the graph, 0 to {most - 1}")
    placed = moves is None or isinstance(moves, Mapping)
    expect(placed, "make_plan(moves=)", moves, "decisions by values, as in {3: Offload()}, or None")
    limited = budget is None or is_count(budget, 1)
    expect(limited, "make_plan(budget=)", budget, "bytes, 1 or more, or None", BudgetError)
    sim = simulator or simulator_of(graph)
    wanted = dict(moves or {})
    refuse_moves(sim, wanted)
    closed, moved = close_with_moves(
        sim, stored, [move_of(sim, value, decision, links, codecs) for value, decision in wanted.items()]
    )
    window = window_bytes or max((m.encoded_bytes for m in moved.values()), default=0)
    simulation = sim.simulate(closed, sim.with_moves(moved.values(), window), links)
    if budget is not None and simulation.peak_bytes > budget:
        raise sim.refusal(simulation, budget, "" if policy in ("optimal", "mixed") else policy)
    limit = budget if budget is not None else simulation.peak_bytes
    if bound is None and moved:
        bound = Bound(0.0, 0)
        notes = (
            *notes,
            "no lower bound is stated for a plan that moves values: the linear program knows only "
            "recomputing",
        )
    floor = bound or Relaxation(sim).bound(limit)
    evicted = set(simulation.evicted)
    rows = simulated_moves(graph, moved, simulation)
    plan = Plan(
        graph=graph.fingerprint(),
        policy=policy,
        budget_bytes=budget,
        decisions={
            v: wanted[v] if v in moved else Recompute() if v in evicted else Keep() for v in sim.droppable
        },
        stored=closed,
        replayed=simulation.replayed,
        plain_peak_bytes=sim.plain_peak,
        predicted_peak_bytes=simulation.peak_bytes,
        plain_seconds=graph.plain_seconds,
        predicted_extra_seconds=simulation.extra_seconds,
        bound_extra_seconds=min(floor.extra_seconds, simulation.extra_seconds),
        bound_peak_bytes=min(floor.peak_bytes, simulation.peak_bytes),
        peak_module=simulation.peak_module,
        peak_operation=simulation.peak_operation.name if simulation.peak_operation else "",
        modules=module_rows(sim, simulation),
        notes=notes,
        program=program_of(graph, closed, rows),
        moves=rows,
        device=graph.device,
        window_bytes=window if rows else 0,
        transfer_seconds=simulation.transfers.seconds if simulation.transfers else 0.0,
        crowding_seconds=simulation.transfers.crowding_seconds if simulation.transfers else 0.0,
    )
    return plan if slab is False else with_slab(sim, plan, required=slab is True)


def check_moves(
    policy: str,
    min_bytes: int,
    window_bytes: int | None = None,
    links: Links | None = None,
    then: Offload | None = None,
) -> None:
    """Check what the policies that move have in common.

    Raises:
        PlanError: one is of another type, or negative.
    """
    expect(is_count(min_bytes), f"{policy}(min_bytes=)", min_bytes, "bytes, 0 or more")
    window = window_bytes is None or is_count(window_bytes, 1)
    expect(window, f"{policy}(window_bytes=)", window_bytes, "bytes, 1 or more, or None")
    speeds = links is None or isinstance(links, Mapping)
    expect(speeds, f"{policy}(links=)", links, "what lowtide.measure_links returns, or None")
    tier = then is None or isinstance(then, Offload)
    expect(tier, f"{policy}(then=)", then, "lowtide.Offload(...), or None")


def module_rows(sim: Simulator, simulation: Simulation) -> tuple[ModuleRow, ...]:
    """The plan's table: one row a module, in the order of the forward."""
    graph = sim.graph
    saved, kept, replayed = Counter[str](), Counter[str](), Counter[str]()
    seconds = defaultdict[str, float](float)
    of_storage: dict[int, str] = {}
    for tensor in graph.saved:
        of_storage.setdefault(sim.storage_of[tensor.value], tensor.module)
    for op in graph.operations:
        for w in op.writes:
            of_storage.setdefault(sim.storage_of[w], op.module)
    for sid, until in sim.storage_hold.items():
        if until > sim.natural_end[sid]:
            saved[of_storage[sid]] += graph.storages[sid].bytes
    for sid in simulation.held_until:
        kept[of_storage.get(sid, "")] += graph.storages[sid].bytes
    for index in simulation.replayed:
        op = graph.operations[index]
        replayed[op.module] += 1
        seconds[op.module] += op.seconds + graph.replay_overhead_seconds
    return tuple(
        ModuleRow(name, saved[name], kept[name], replayed[name], seconds[name])
        for name in dict.fromkeys([*(op.module for op in graph.operations), *saved, *kept])
        if name in saved or name in kept or name in replayed
    )


def program_of(
    graph: StepGraph, stored: frozenset[int], moves: Sequence[Move] = ()
) -> tuple[ProgramStep, ...]:
    """The forward as an executor follows it: one step for each operation, in order.

    An operation may run again when something evicted depends on it, also where this step's backward never
    unpacked that.
    """
    number = {move.value: k for k, move in enumerate(moves)}
    stored = stored | number.keys()
    wanted = [tensor.value for tensor in graph.saved if tensor.droppable and tensor.value not in stored]
    producer = [-1 if value.producer is None else value.producer for value in graph.values]
    there = [value in stored for value in range(len(producer))]
    again = replay_set(wanted, producer, [operation.reads for operation in graph.operations], there)
    return tuple(
        ProgramStep(
            operation.name,
            operation.index in again,
            tuple(value in stored for value in operation.writes),
            tuple(number.get(value, -1) for value in operation.writes)
            if any(value in number for value in operation.writes)
            else (),
        )
        for operation in graph.operations
        if operation.phase == "forward"
    )
