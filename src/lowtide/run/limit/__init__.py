"""A model whose training step stays within a budget: `lowtide.limit_memory`.

In: a model and a budget. Out: a handle; the limiter replaces the model's forward. Read `entry_states.py`
first (what becomes of a cached plan, as a table), then `limiter.py` (a call, from `Limiter.__call__` on),
`step.py` (one step, profiled or under a plan), `cache.py` (the owner of the entries) and `planning.py` (from
a profiled step to its plan). `entry.py` has a cached plan's records, `machine.py` assigns them; `calls.py`
runs calls that are no limited steps; `handle.py` is what users hold.
"""
