"""Policies: functions from a step graph (and a budget) to a plan.

In: what a user wants (`full`, `selective`, `offload`, `mixed`, ...). Out: a policy, called as
``policy(graph, budget=None)``, which returns a `Plan`. A user's own is any function with that signature,
usually one that picks the values to store and ends in `make_plan`. Begin with `by_rule.py`, then
`build.py`.

>>> from lowtide.plan import policies
>>> policy = policies.selective(recompute_ops=["aten.gelu"])
"""

from lowtide.plan.policies.build import Policy, make_plan
from lowtide.plan.policies.by_rule import (
    compress,
    full,
    keep_all,
    offload,
    partition,
    scope,
    selective,
    sqrt,
)
from lowtide.plan.policies.chosen import mixed, optimal

__all__ = [
    "Policy", "compress", "full", "keep_all", "make_plan", "mixed", "offload", "optimal", "partition",
    "scope", "selective", "sqrt",
]  # fmt: skip
