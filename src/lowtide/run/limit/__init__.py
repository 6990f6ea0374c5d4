"""A model whose training step stays within a budget: `lowtide.limit_memory`.

In: a model and a budget. Out: a handle; the limiter replaces the model's forward. Read these four first, in
their order:

`limiter.py`  a call of the model, from `Limiter.__call__` on
`step.py`     one step, profiled or under a plan
`book.py`     the plans by key: it owns the entries
`planning.py` from a profiled step to its plan

`entry.py`    the records of a cached plan
`key.py`      what a step begins with, and its cache key
`calls.py`    which calls are no limited steps, and how these run; warns where no limited step ever begins
`checks.py`   arguments and models that a limit refuses
`handle.py`   what users hold
"""
