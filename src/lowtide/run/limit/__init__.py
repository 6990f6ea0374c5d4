"""A model whose training step stays within a budget: `lowtide.limit_memory`.

In: a model and a budget. Out: a handle; the limiter replaces the model's forward. Begin with `handle.py`
(what users hold), `limiter.py` (one step), `outcome.py` (what follows a step), `kinds.py` (what is known of
each kind of step), `planned.py` (its plan in force) and `planning.py` (from a step that was looked at to its
plan).
"""
