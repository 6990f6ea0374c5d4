"""Regions that keep only what enters them: `lowtide.checkpointing` and `lowtide.checkpoint`.

In: a region of somebody's forward, and a rule. Out: the same gradients. Begin with `scope.py`.
"""
