"""Policies: functions from a step graph (and a budget) to a plan.

Those that keep and recompute are in `lowtide.plan.policies`; those that move values are in
`lowtide.extensions.moves`, and are loaded when they are first used.

>>> from lowtide import policies
>>> policy = policies.selective(recompute_ops=["aten.gelu"])
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan.bound import Bound
from lowtide.plan.data import Links, Moving, Plan
from lowtide.plan.policies import Policy, build, full, keep_all, optimal, scope, selective, sqrt
from lowtide.plan.simulate.simulator import Simulator, simulator_of

if TYPE_CHECKING:
    from lowtide.extensions.moves.by_rule import compress, offload, partition
    from lowtide.extensions.moves.mixed import mixed
    from lowtide.extensions.moves.store.codec import Codec

__all__ = [
    "Policy", "compress", "full", "keep_all", "make_plan", "mixed", "offload", "optimal", "partition",
    "scope", "selective", "sqrt",
]  # fmt: skip

_MOVING = {"compress": "by_rule", "offload": "by_rule", "partition": "by_rule", "mixed": "mixed"}


def __getattr__(name: str) -> Any:
    if name not in _MOVING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lowtide.extensions.moves.{_MOVING[name]}"), name)


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
    if moves is None and slab is None:
        return build.make_plan(
            graph, stored=stored, policy=policy, budget=budget, bound=bound, notes=notes, simulator=simulator
        )
    from lowtide.extensions.moves.layout import with_slab  # neither loads a tier yet
    from lowtide.extensions.moves.plans import NO_BOUND, simulate_moving

    if slab not in (None, True, False):
        raise PlanError(f"slab={slab!r}: give True, False, or None for where the budget has room for it")
    build.check_wish(graph, stored, budget)
    sim = simulator or simulator_of(graph)
    simulation, moved, window = simulate_moving(sim, stored, moves, window_bytes, links, codecs)
    if bound is None and moved:
        bound, notes = Bound(0.0, 0), (*notes, NO_BOUND)
    plan = build.plan_of(sim, simulation, policy, budget, bound, notes, moved, window)
    return plan if slab is False else with_slab(sim, plan, required=slab is True)
