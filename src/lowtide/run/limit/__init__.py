"""A model whose training step stays within a budget: `lowtide.limit_memory`.

In: a model and a budget. Out: a handle; the model's forward is the limiter's from then on. Begin with
`handle.py` (what users hold), `limiter.py` (the state machine of a step), `kinds.py` (what is known of one
kind of step, and what its steps teach), `known.py` (of them all) and `planning.py` (from a step that was
looked at to its plan).
"""
