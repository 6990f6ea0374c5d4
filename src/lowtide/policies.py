"""Policies: functions from a step graph (and a budget) to a plan.

Those that keep and recompute are in `lowtide.plan.policies`; those that move values are in
`lowtide.extensions.moves`, and are loaded when they are first used.

>>> from lowtide import policies
>>> policy = policies.selective(recompute_ops=["aten.gelu"])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide.plan.policies import Policy, full, keep_all, optimal, scope, selective, sqrt

if TYPE_CHECKING:
    from lowtide.extensions.moves.auto import auto
    from lowtide.extensions.moves.by_rule import compress, offload, partition
    from lowtide.extensions.moves.mixed import mixed
    from lowtide.extensions.moves.plans import make_plan

__all__ = [
    "Policy", "auto", "compress", "full", "keep_all", "make_plan", "mixed", "offload", "optimal", "partition",
    "scope", "selective", "sqrt",
]  # fmt: skip

_MOVING = {
    "auto": "auto",
    "compress": "by_rule",
    "offload": "by_rule",
    "partition": "by_rule",
    "mixed": "mixed",
    "make_plan": "plans",
}


def __getattr__(name: str) -> Any:
    if name not in _MOVING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lowtide.extensions.moves.{_MOVING[name]}"), name)
