"""Where saved bytes live between forward and backward.

In: a device tensor. Out: the same bytes, or what a lossy codec makes of them, in time for backward. Tiers
(`host`, `disk`, which share `tier`), codecs (`codec`), the slab that values come back into and the places in
any slab (`slab`), a slab for gradients (`gradients`). `lanes` moves bytes in the background. `stores` opens
them, and has parts on several ranks. Nothing here imports plans or graphs. Begin with `stores.py`, then
`tier.py`.
"""
