"""Regions of a forward that keep only their inputs: `lowtide.checkpointing` and `lowtide.checkpoint`.

In: a region of a forward, and a policy. Out: the same gradients. Begin with `scope.py`; `rules.py` makes of a
policy the director that tells the recorder what stays.
"""
