"""Recompute and offload together: the cheapest mix within a budget.

For a range of larger budgets the planner (`lowtide.plan.optimal`) says what is cheapest to recompute; of what that plan keeps, as few values as
it takes, the earliest of the forward first, wait in the tier instead. Every mix is simulated exactly, its transfers with a clock, and the one with the
least extra seconds is taken; recomputing alone and offloading alone are among them, so the mix is never worse than either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan.moves import default_window, fewest, movable, moved_of
from lowtide.plan.plan import Moving, Offload, Plan
from lowtide.plan.simulate import Simulator
from lowtide.plan.traffic import Link, Links

if TYPE_CHECKING:
    from lowtide.plan.optimal import Planner

_POINTS = 6
"""Budgets between the real one and the plain step's peak for which recomputation is planned."""


def mixed_policy(decision: Offload, links: Links | None, min_bytes: int, window_bytes: int | None) -> Callable[..., Plan]:
    """See `lowtide.plan.policies.mixed`."""

    def mixed(graph: StepGraph, budget: int | None = None) -> Plan:
        from lowtide.plan.build import make_plan
        from lowtide.plan.optimal import Planner

        speeds = links if links is not None else {decision.tier: measure_link(decision, graph.device)}
        planner = Planner(graph)
        sim = planner.sim
        order = movable(sim, min_bytes)
        window = window_bytes or default_window(sim, order)
        limit = budget if budget is not None else sim.plain_peak // 2
        found: list[tuple[float, frozenset[int], dict[int, Moving]]] = []
        seconds: dict[str, float] = {}
        for target, stored in _recomputing(planner, limit):
            mine = [v for v in order if v in stored]
            count = fewest(sim, stored, mine, decision, limit, window)
            if count is None:
                continue
            moves: dict[int, Moving] = dict.fromkeys(mine[:count], decision)
            if moves:
                simulation = sim.moving(moved_of(sim, moves), window).simulate(stored - moves.keys(), speeds)
            else:
                simulation = sim.simulate(stored)
            found.append((simulation.extra_seconds, stored, moves))
            if target <= limit:
                seconds["recomputing alone"] = simulation.extra_seconds
            elif not simulation.replayed:
                seconds["offloading alone"] = simulation.extra_seconds
        if not found:
            raise BudgetError(
                f"no mix of recomputing and {decision.tier} fits in {limit:,} bytes: lower min_bytes= or give a larger budget"
            )
        extra, stored, moves = min(found, key=lambda row: row[0])
        told = ", ".join(f"{name} {1000 * s:.1f} ms" for name, s in seconds.items())
        notes = (f"of {len(found)} mixes this adds least: {1000 * extra:.1f} ms" + (f" ({told})" if told else ""),)
        return make_plan(
            graph, stored=stored, policy="mixed", budget=budget, simulator=sim, moves=moves, window_bytes=window, links=speeds, notes=notes,
            bound=planner.bound(limit) if not moves else True,
        )  # fmt: skip

    return mixed


def _recomputing(planner: Planner, limit: int) -> Iterator[tuple[int, frozenset[int]]]:
    """(budget, what the cheapest recomputation for it stores), from the real budget up to the plain step."""
    from lowtide.plan.build import close

    sim: Simulator = planner.sim
    top = sim.plain_peak
    for k in range(_POINTS):
        target = limit + (top - limit) * k // _POINTS
        try:
            yield target, planner.solve(target).stored
        except BudgetError:
            continue
    yield top, close(planner.graph, sim.droppable, sim)


def measure_link(decision: Offload, device: str) -> Link:
    """Move some bytes to the tier and back, and time it."""
    from lowtide.store.stores import Stores, measure_tier

    with Stores() as stores:
        place = torch.device(device)
        tier = stores.tier(decision.tier, decision.path, place)
        write, read, busy = measure_tier(tier, place)
    return Link(write, read, latency_seconds=1e-4, busy=0.5 * busy if device == "cpu" and torch.get_num_threads() > 1 else 0.0)
