"""A model whose training step stays within a budget: `lowtide.limit_memory`.

In: a model and a budget. Out: a handle; the limiter replaces the model's forward. Read these five first, in
their order:

`entry_states.py`  what becomes of a cached plan, as a table
`limiter.py`  a call of the model, from `Limiter.__call__` on
`step.py`     one step, profiled or under a plan
`cache.py`    the cached plans by key: it owns the entries
`planning.py` from a profiled step to its plan

`entry.py`    the records of a cached plan
`machine.py`  looks up what follows in the table, and assigns the records; no other file does
`key.py`      what a step begins with, and its cache key
`calls.py`    which calls are no limited steps, and how these run
`checks.py`   arguments and models that a limit refuses
`engagement.py`  warns where no limited step ever begins
`handle.py`   what users hold
"""
