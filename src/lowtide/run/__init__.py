"""Run a step under a plan.

In: a model and a budget, or a plan; out: the same step within the plan's memory, bit for bit. Read upwards,
each folder knows only those before it: `move` (values that leave the device), `record` (what is evicted, and
its replay), `scope`, `look` and `apply.py` (three uses of the recorder), `limit` (`lowtide.limit_memory`).
The other files here, and `ranks`, serve several of them and know none.
"""
