"""Regions of a forward that keep only their inputs: `lowtide.checkpointing` and `lowtide.checkpoint`.

In: a region of a forward, and a rule. Out: the same gradients. Begin with `scope.py`; `rules.py` turns what a
user gives into a rule.
"""
