"""Which values may move, where to, and what that takes.

In: a `Simulator`, the decisions that a user offers, and, as data, how fast links and codecs are. Out: for
each value the placements that fit it (`Move`), which is what the simulator and the bound go by.
"""
