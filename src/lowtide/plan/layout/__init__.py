"""Where bytes lie: static offsets for buffers with known lifetimes (dynamic storage allocation).

In: when each buffer is born and dies, and its size. Out: an offset for each, with the height and a bound on
it. Begin with `offsets.py`; `slab.py` lays out what a plan's moved values come back into.
"""

from lowtide.plan.layout.offsets import Layout, check, find, layout

__all__ = ["Layout", "check", "find", "layout"]
