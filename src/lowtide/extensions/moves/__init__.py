"""Values that move between forward and backward: to another tier, into fewer bytes, or in parts over ranks.

`extension`  what a limited model holds, and asks to move
`by_rule`    the policies offload, compress and partition
`auto`       the policy on an accelerator by default: recompute, or move to main memory, too
`mixed`      the policy that chooses among all that may happen to a value
`plans`      from a wish to a plan, where values move
`bound`      a budget -> the seconds that no plan undercuts, where values may move
`placements` which values may move, in which ways, and what that costs
`simulate`   which of their bytes are where when, and what waiting takes
`layout`     where bytes lie: a slab for what comes back
`engine`     carries out a plan's moves
`speeds`     how fast tiers, codecs and groups are, measured
`store`      tiers, codecs, shards: where the bytes are meanwhile
"""
