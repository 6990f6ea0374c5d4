"""Policies: functions from a step graph (and a budget) to a plan.

In: what a user wants (`full`, `selective`, `optimal`, ...). Out: a policy, called as
``policy(graph, budget=None)``, which returns a `Plan`. A user's own is any function with that signature,
usually one that picks the values to store and ends in `make_plan`. Those here keep and recompute; those that
move values are in `lowtide.extensions.moves`, and `lowtide.policies` has all. Begin with `by_rule.py`, then
`build.py`.

>>> from lowtide.plan import policies
>>> policy = policies.selective(recompute_ops=["aten.gelu"])
"""

from lowtide.plan.policies.build import Policy, make_plan
from lowtide.plan.policies.by_rule import (
    full,
    keep_all,
    scope,
    selective,
    sqrt,
)
from lowtide.plan.policies.chosen import optimal

__all__ = ["Policy", "full", "keep_all", "make_plan", "optimal", "scope", "selective", "sqrt"]
