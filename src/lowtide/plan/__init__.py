"""Decide: from a step graph and a budget to a plan.

``lowtide.plan(graph, budget=...)`` makes one; `simulate` says exactly what any set of stored values does; `policies` has the ways to
choose.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lowtide.plan.plan import Chain, Compress, Decision, Keep, ModuleRow, Offload, Plan, Recompute, Shard

if TYPE_CHECKING:
    from lowtide.graph import StepGraph
    from lowtide.plan.build import close, make_plan
    from lowtide.plan.policies import Policy
    from lowtide.plan.simulate import Simulation, Simulator, plain, simulate

__all__ = [
    "Chain",
    "Compress",
    "Decision",
    "Keep",
    "ModuleRow",
    "Offload",
    "Plan",
    "Recompute",
    "Shard",
    "Simulation",
    "Simulator",
    "close",
    "make",
    "make_plan",
    "plain",
    "resolve",
    "simulate",
]

_HOMES = {
    "Simulation": "simulate",
    "Simulator": "simulate",
    "plain": "simulate",
    "close": "build",
    "make_plan": "build",
}


POLICIES = ("optimal", "keep_all", "full", "sqrt", "selective", "offload", "mixed", "compress")
"""Those that are known by name."""


def resolve(policy: str | Policy) -> Policy:
    """The policy of that name, or the function itself.

    Raises:
        PlanError: there is no such policy.
    """
    from lowtide.errors import PlanError
    from lowtide.plan import policies

    if callable(policy):
        return policy
    if policy not in POLICIES:
        raise PlanError(f"there is no policy {policy!r}: give one of {', '.join(sorted(POLICIES))}, or a function of (graph, budget)")
    return getattr(policies, policy)()


def make(graph: StepGraph, budget: str | int | None = None, policy: str | Policy = "optimal") -> Plan:
    """The plan that ``policy`` makes for ``graph`` within ``budget``: bytes, or text such as ``"600MiB"`` or ``"60%"`` of the plain peak.

    Raises:
        BudgetError: the policy cannot meet the budget; the error carries the smallest one that it can.
        PlanError: ``graph`` is no step graph; the policy does not exist, does not apply to this graph, or returns no plan.
    """
    from lowtide.errors import PlanError
    from lowtide.graph import StepGraph

    if not isinstance(graph, StepGraph):
        raise PlanError(f"lowtide.plan takes a StepGraph, not {type(graph).__name__}: make one with lowtide.trace(step, *args)")
    if budget is not None:
        from lowtide.budget import parse
        from lowtide.plan.simulate import plain

        budget = parse(budget, plain(graph).peak_bytes)
    made = resolve(policy)(graph, budget)
    if not isinstance(made, Plan):
        raise PlanError(
            f"the policy {policy!r} returned {type(made).__name__}, not a Plan: end it in lowtide.policies.make_plan(graph, ...)"
        )
    return made


class _Room(ModuleType):
    """Lets ``lowtide.plan`` be the room and the verb: ``lowtide.plan(graph, budget=...)``."""

    def __call__(self, graph: StepGraph, budget: str | int | None = None, policy: str | Policy = "optimal") -> Plan:
        return make(graph, budget, policy)

    def __getattr__(self, name: str) -> Any:
        if name in _HOMES:
            from importlib import import_module

            return getattr(import_module(f"lowtide.plan.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'lowtide.plan' has no attribute {name!r}")


sys.modules[__name__].__class__ = _Room
