"""Record operations as they run, evict what autograd saves, and replay it in backward.

In: a director, which follows a plan's program or a scope's rule and decides of each operation whether it is
recorded and which of its results stay. Out: the same bits from backward. Begin with `tape.py` (values and
operations), then `recorder.py` (how they are recorded), `handles.py` (what autograd holds in place of a saved
tensor) and `replay.py` (how a value comes back, random numbers included). `cpp/` does the same for the plain
operations of a plan; `native.py` hands it the plan's program.
"""
