"""What a plan is: plain data, saved as JSON. No file here needs torch or a solver.

In: what a policy chose, or the JSON of an earlier plan. Out: decisions (what may happen to a saved value),
`Plan` (a decision for every saved value of a step, and what that is predicted to cost), `Move` and `Link`
(values that leave their place, and how fast). Begin with `decisions.py`, then `plan.py`.
"""

from lowtide.plan.data.decisions import (
    Chain,
    Compress,
    Decision,
    Keep,
    Link,
    Links,
    ModuleRow,
    Move,
    Moving,
    Offload,
    Recompute,
    Shard,
    codecs_behind,
    decision_of,
    form_and_tier,
)
from lowtide.plan.data.plan import Plan, ProgramStep, in_one_line
from lowtide.words import module_in_words

__all__ = [
    "Chain", "Compress", "Decision", "Keep", "Link", "Links", "ModuleRow", "Move",
    "Moving", "Offload", "Plan", "ProgramStep", "Recompute", "Shard", "codecs_behind", "decision_of",
    "form_and_tier", "in_one_line", "module_in_words",
]  # fmt: skip
