"""Run a step within its memory.

In: a model and a budget, or a plan; out: the same step within that memory, bit for bit. Read upwards, each
of these knows only those before it: `record` (what is recorded, evicted and replayed), `watch.py` (one step:
its backwards, peak and time), `profile` (a step that is written down), `limit` (`lowtide.limit_memory`). The
other files here serve several of them and know none.
"""
