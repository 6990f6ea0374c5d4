"""A model whose training step stays within a budget: `lowtide.limit_memory`.

In: a model and a budget. Out: a handle; the limiter replaces the model's forward. Read `machine.py` first
(the states of a cached plan, as a table), then `limiter.py` (a call, from `Limiter.__call__` on),
`step.py` (one step, profiled or under a plan), `cache.py` (the owner of the entries) and `planning.py` (from
a profiled step to its plan). `handle.py` is what users hold, `entry.py` a cached plan.
"""
