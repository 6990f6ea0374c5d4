"""Where saved bytes live between forward and backward: host and disk, codecs, shards over a group of ranks;
the slab that they come back into; and the slab of parameter gradients.

`Stores` opens them by name. Nothing here imports the planner or the executor: to `Stores` a plan is any
object that its tiers are laid out for.
"""
