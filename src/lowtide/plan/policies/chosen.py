"""The policy that searches among what stays and what is recomputed: optimal."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from lowtide.errors import BudgetError, expect
from lowtide.graph import StepGraph
from lowtide.plan.data import Plan
from lowtide.plan.local_search import Candidate
from lowtide.plan.policies.build import Policy, plan_of
from lowtide.plan.search import Search, search_of

ENDED_EARLY = "the search ended early, and a longer one may find a plan with less extra time"
"""The note of a plan whose search ended early."""

_FREED = (
    "the checkpointing scopes take more than this budget, so the plan keeps some tensors that they "
    "would recompute"
)


def optimal(seconds: float | None = None) -> Policy:
    """The least extra time within the budget, see `lowtide.plan.search`.

    Args:
        seconds: about how long to search, once there is a plan that fits; ``None`` for half a minute. Counted
            in work that is done, not timed: the same graph gets the same plan.
    """
    given = seconds is None or (isinstance(seconds, (int, float)) and seconds > 0)
    expect(given, "optimal(seconds=)", seconds, "seconds, more than 0, or None")
    if seconds is None:
        return least_time
    return obey_scopes(functools.partial(_least_time, seconds=seconds))


def obey_scopes(choose: Policy) -> Policy:
    """A policy that evicts what checkpointing scopes evict, wherever the budget can be met so. Where it
    cannot, as below what long scopes take by themselves, ``choose`` decides about that, too.
    """
    return functools.partial(_obey_scopes, choose)


def _obey_scopes(choose: Policy, graph: StepGraph, budget: int | None = None) -> Plan:
    free = graph.without_scopes()
    if free is graph:
        return choose(graph, budget)
    plans, refusals = list[Plan](), list[BudgetError]()
    for step in (graph, free):
        try:
            plan = choose(step, budget)
        except BudgetError as error:
            refusals.append(error)
            continue
        if step is free:
            plan = replace(plan, graph=graph.fingerprint(), notes=(*plan.notes, _FREED))
        if budget is not None:
            return plan
        plans.append(plan)
    if plans:
        return min(plans, key=lambda plan: plan.predicted_peak_bytes)
    raise min(refusals, key=lambda error: error.smallest_bytes or math.inf)


def _least_time(
    graph: StepGraph, budget: int | None = None, seconds: float | None = None, at_once: bool = False
) -> Plan:
    """The plan with the least extra seconds whose peak is within ``budget`` bytes (``None``: the smallest
    peak that can be met).

    Raises:
        BudgetError: no plan fits; the error carries the smallest budget that can be met.
    """
    search = search_of(graph)
    with search.lock:
        limit = _least(search, seconds, at_once).simulation.peak_bytes if budget is None else budget
        best = search.solve(limit, seconds, at_once)
        early = search.ended_early(best, limit) or (at_once and budget is None)
        bound, notes = search.relaxation.bound(limit), (ENDED_EARLY,) if early else ()
        return plan_of(search.sim, best.simulation, "optimal", budget, bound, notes)


def _least(search: Search, seconds: float | None, at_once: bool) -> Candidate:
    """The plan with the smallest peak that is found."""
    return search.lowest_within(seconds / 2) if at_once and seconds else search.lowest


least_time = obey_scopes(_least_time)


def searches(policy: Policy) -> bool:
    """Whether a policy searches for a plan, and does not say itself for how long. One that is no function may
    say so (``searches``).
    """
    return policy is least_time or getattr(policy, "searches", False)


def hurried(policy: Policy, seconds: float, device: str, at_once: bool = False) -> Policy:
    """The same policy, whose search takes about so many seconds.

    Args:
        policy: of a user; what does not search stays. It may have this as a method.
        seconds: about how long it may search.
        device: that values leave.
        at_once: other ranks wait: that there is a plan counts most.
    """
    if policy is least_time:
        return obey_scopes(functools.partial(_least_time, seconds=seconds, at_once=at_once))
    own = getattr(policy, "hurried", None)
    return policy if own is None else own(seconds, device)
