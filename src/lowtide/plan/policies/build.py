"""From a wish to a plan: make a set of stored values feasible, simulate it, bound it, and write the table.

Every policy ends here, a user's own included: decide which values stay, call `make_plan`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Protocol

from lowtide.errors import BudgetError, expect, is_count
from lowtide.graph import StepGraph
from lowtide.plan.bound import Bound, Relaxation
from lowtide.plan.data import Keep, ModuleRow, Move, Plan, ProgramStep, Recompute
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
) -> Plan:
    """The plan that stores ``stored``: closed to a feasible set, simulated, bounded and with its table.

    Args:
        graph: the step.
        stored: ids of the values that stay; every other droppable saved value is evicted where that is
            possible.
        policy: the name that the plan carries.
        budget: the most live bytes allowed, or ``None``.
        bound: lower bounds that are known already; without them they are computed (a linear program: seconds
            on large graphs).
        notes: anything worth telling.
        simulator: of ``graph``, where one was made already.

    Raises:
        BudgetError: the plan's peak is above the budget.
        PlanError: an argument is something else.
    """
    check_wish(graph, stored, budget)
    sim = simulator or simulator_of(graph)
    simulation = sim.simulate(sim.close(stored))
    return plan_of(sim, simulation, policy, budget, bound, notes)


def check_wish(graph: StepGraph, stored: Collection[int], budget: int | None) -> None:
    """Check what a plan is made from.

    Raises:
        BudgetError: the budget is no number of bytes.
        PlanError: an argument is something else.
    """
    expect(isinstance(graph, StepGraph), "make_plan(graph=)", graph, "a StepGraph, as lowtide.trace returns")
    ids, most = isinstance(stored, Collection) and not isinstance(stored, str), len(graph.values)
    known = ids and all(map(is_count, stored)) and max(stored, default=-1) < most
    expect(known, "make_plan(stored=)", stored, f"the ids of values of the graph, 0 to {most - 1}")
    limited = budget is None or is_count(budget, 1)
    expect(limited, "make_plan(budget=)", budget, "bytes, 1 or more, or None", BudgetError)


def plan_of(
    sim: Simulator,
    simulation: Simulation,
    policy: str,
    budget: int | None,
    bound: Bound | None,
    notes: tuple[str, ...],
    rows: Sequence[Move] = (),
    window_bytes: int = 0,
) -> Plan:
    """The plan of a simulated step.

    Args:
        sim: of the step.
        simulation: what it does under the plan.
        policy, budget, bound, notes: as of `make_plan`.
        rows: the values that move, in the order of the forward.
        window_bytes: the most of these that is under way at one time in each direction.

    Raises:
        BudgetError: the peak is above the budget.
    """
    if budget is not None and simulation.peak_bytes > budget:
        raise sim.refusal(simulation, budget, "" if policy in ("auto", "optimal", "mixed") else policy)
    graph = sim.graph
    floor = bound or Relaxation(sim).bound(budget if budget is not None else simulation.peak_bytes)
    evicted, transfers = set(simulation.evicted), simulation.transfers
    moving = {move.value: move.decision for move in rows}
    return Plan(
        graph=graph.fingerprint(),
        policy=policy,
        budget_bytes=budget,
        decisions={v: moving.get(v) or (Recompute() if v in evicted else Keep()) for v in sim.droppable},
        stored=simulation.stored,
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
        program=program_of(graph, simulation.stored, rows),
        moves=tuple(rows),
        device=graph.device,
        window_bytes=window_bytes if rows else 0,
        transfer_seconds=transfers.seconds if transfers is not None else 0.0,
        crowding_seconds=transfers.crowding_seconds if transfers is not None else 0.0,
    )


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
    number = {move.value: k for k, move in enumerate(moves)} if moves else {}
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
