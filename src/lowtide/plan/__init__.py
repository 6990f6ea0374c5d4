"""Choose: what stays, what is recomputed, what moves.

In: a `StepGraph` and a budget. Out: a `Plan`, made by a policy: ``lowtide.plan(graph, budget=...)``. Read
`search.py` first, then `simulate/simulator.py`. Each of these knows those before it:

`data`      what a plan is: decisions, moves, the plan and its table
`simulate`  a set of stored values -> live bytes at every event, what runs again, seconds
`blocks`    a model's blocks and segments -> what checkpointing them stores
`bound`     a budget -> the seconds that no plan undercuts
`local_search`  a plan -> one with decisions changed, which is faster or lower
`search`    a budget -> the stored values with the least seconds
`policies`  how to choose; each ends in `make_plan`. They import a solver, so they are loaded when first used
`choose`    a budget and a price -> the plan whose steps really take no more: plan, price, ask again
"""

from __future__ import annotations

import inspect
import math
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from lowtide.budget import resolve as bytes_of
from lowtide.errors import PlanError, expect
from lowtide.graph import StepGraph
from lowtide.plan.data import Plan, in_one_line
from lowtide.plan.simulate import plain
from lowtide.progress import working

if TYPE_CHECKING:
    from lowtide.plan.policies import Policy

__all__ = ["POLICIES", "Plan", "make", "plain", "resolve"]

_OWN, _MOVING = "lowtide.plan.policies", "lowtide.extensions.moves"
POLICIES = {
    "auto": f"{_MOVING}.auto",
    "optimal": _OWN,
    "keep_all": _OWN,
    "full": _OWN,
    "sqrt": _OWN,
    "selective": _OWN,
    "offload": f"{_MOVING}.by_rule",
    "mixed": f"{_MOVING}.mixed",
    "compress": f"{_MOVING}.by_rule",
}
"""Policies that are known by name, and where they are: what is named there is loaded when it is asked for."""


def resolve(policy: str | Policy) -> Policy:
    """The policy of that name, or the function itself.

    Raises:
        PlanError: there is no such policy.
    """
    if callable(policy):
        return policy
    if policy not in POLICIES:
        raise PlanError(
            f"there is no policy {policy!r}: give one of {', '.join(sorted(POLICIES))}, or a function of "
            "(graph, budget)"
        )
    return getattr(import_module(POLICIES[policy]), policy)()


def within_seconds(policy: str | Policy, seconds: float | None, device: str) -> str | Policy:
    """The policy, whose search takes about so many seconds; ``None`` leaves it as it is.

    Args:
        policy: a policy or its name; one that searches, and does not say itself for how long.
        seconds: as `check_seconds` has checked them.
        device: that values leave.
    """
    if seconds is None:
        return policy
    from lowtide.plan.policies.chosen import hurried

    return hurried(resolve(policy), seconds, device)


def check_seconds(seconds: float | None, policy: str | Policy | None, what: str) -> None:
    """Check how long a search may take, and that there is one.

    Args:
        seconds: as given; ``None`` for what is usual.
        policy: as given; ``None`` searches.
        what: names the argument, as in ``"limit_memory(plan_seconds=)"``.

    Raises:
        PlanError: that is no time, or the policy does not search, or says itself for how long.
    """
    if seconds is None:
        return
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    fits = number and 0 < seconds < math.inf
    expect(fits, what, seconds, "seconds, more than 0, or None for what is usual")
    searching = policy in (None, "auto", "optimal", "mixed")
    if callable(policy):
        from lowtide.plan.policies.chosen import searches

        searching = searches(policy)
    if not searching:
        name = policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)
        raise PlanError(
            f"{what} is for policies that search and do not say for how long, and the policy is {name}: "
            "leave one of them out, or choose auto, optimal or mixed"
        )


def make(
    graph: StepGraph,
    budget: str | int | None = None,
    policy: str | Policy = "optimal",
    progress: bool | None = None,
) -> Plan:
    """The plan that ``policy`` makes for ``graph`` within ``budget``.

    Args:
        graph: the step.
        budget: bytes, ``"600MiB"``, ``"60%"`` of the plain step's peak, ``"min"`` for the smallest that the
            policy can meet, or ``"auto"`` for what is free on the graph's device, less a reserve
            (`lowtide.budget.resolve`). Without one the policy decides: ``"optimal"`` and ``"mixed"`` take as
            little memory as they can.
        policy: a policy or its name.
        progress: whether a terminal is told what takes long; ``None`` goes by the environment
            (`lowtide.progress`).

    Raises:
        BudgetError: the policy cannot meet the budget; the error carries the smallest one that it can.
        PlanError: ``graph`` is no step graph; the policy does not exist, does not apply to this graph, or
            returns no plan.
    """
    if not isinstance(graph, StepGraph):
        raise PlanError(
            f"lowtide.plan takes a StepGraph, not {type(graph).__name__}: make one with lowtide.trace(step, "
            "*args)"
        )
    chosen = resolve(policy)
    limit = None
    with working("planning", "planned", progress) as work:
        if budget is not None:
            peak = plain(graph).peak_bytes
            limit = bytes_of(budget, peak, lambda: chosen(graph, None).predicted_peak_bytes, graph.device)
        made = chosen(graph, limit)
        if isinstance(made, Plan):
            work.done(in_one_line(made))
    if not isinstance(made, Plan):
        raise PlanError(
            f"the policy {policy!r} returned {type(made).__name__}, not a Plan: end it in "
            "lowtide.policies.make_plan(graph, ...)"
        )
    return made


class _Callable(ModuleType):
    """Makes the package callable: ``lowtide.plan(graph, budget=...)``."""

    __call__ = staticmethod(make)
    __signature__ = inspect.signature(make)


sys.modules[__name__].__class__ = _Callable
