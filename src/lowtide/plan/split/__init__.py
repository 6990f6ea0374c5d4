"""Cut the forward: into stages where few bytes cross, and into the blocks that its modules' names tell.

In: a `Simulator`. Out: `Stages`, which the bound and the search go by, and the sets of values that
checkpointing each block, or stretches of equal size, stores.
"""
