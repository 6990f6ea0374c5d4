"""Run a step under a plan.

In: a model and a budget, or a plan; out: the same step within the plan's memory, bit for bit. Read upwards,
each of these knows only those before it: `transfers.py` (values that leave the device), `record` (what is
evicted, and its replay), `scope` and `apply.py` (two uses of the recorder), `profile` (a first step, on a
tape of segments), `limit` (`lowtide.limit_memory`). The other files here serve several of them and know none.
"""
