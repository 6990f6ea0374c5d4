"""Record operations as they run, evict what autograd saves, and replay it in backward.

In: a director, which follows a plan's program or a scope's rule and decides of each operation whether it is
recorded and which of its results stay. Out: the same bits from backward. Begin with `values.py` (values and
operations), then `tape.py` (how they are recorded), `recorder.py` (when), `handles.py` (what autograd holds
in place of a saved tensor) and `replay.py` (how a value comes back, random numbers included).

Why there are two recorders: `cpp/` takes a plan's plain operations, most of any step, in little of the host's
time (in a profiled step, too: `cpp/profile.h`), and evicts on demand. Everything else is Python's, on the
same tape: random numbers, writes to known values, moves, collectives, subclasses, scopes, verifying.
"""
