"""Where saved bytes live between forward and backward.

In: a device tensor. Out: the same bytes, or what a lossy codec makes of them, in time for backward. Tiers
(`host`, `disk`, which share `tier`), codecs (`codec`, `coding`), parts on several ranks (`shard`), the slab
that values come back into (`slab`), a slab for gradients (`gradients`). `lanes` moves bytes in the
background, `memory` reserves host memory, `measure` times links. Nothing here imports plans or graphs. Begin
with `stores.py`.
"""
