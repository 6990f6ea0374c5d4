"""What a plan is: plain data, saved as JSON, that needs neither torch nor a solver.

In: nothing. Out: decisions (what may happen to a saved value), `Plan` (a decision for every saved value of a
step, and what that is predicted to cost), `Move` and `Link` (values that move, and how fast).
"""

from lowtide.links import Link, Links
from lowtide.plan.data.decisions import (
    Chain,
    Compress,
    Decision,
    Keep,
    Moving,
    Offload,
    Recompute,
    Shard,
    decision_of,
    stages,
)
from lowtide.plan.data.move import Move
from lowtide.plan.data.plan import Plan, ProgramStep, in_one_line
from lowtide.plan.data.table import ModuleRow, module_in_words

__all__ = [
    "Chain", "Compress", "Decision", "Keep", "Link", "Links", "ModuleRow", "Move",
    "Moving", "Offload", "Plan", "ProgramStep", "Recompute", "Shard", "decision_of", "in_one_line",
    "module_in_words", "stages",
]  # fmt: skip
