"""Record operations as they run, evict what autograd saves, and replay it in backward.

In: a director, which says of each operation whether it is recorded and what it writes stays; a plan's
program or a scope's rule. Out: the same bits from backward. Begin with `recorder.py` (what stands between
autograd and the operations), then `tape.py` (what is on record) and `replay.py` (how it comes back). `cpp/`
is the same for the operations of a plan that need no closer look; `native.py` tells it of the plan.
"""
