"""What users need of where saved bytes live: a codec of their own, and gradients in one slab. The rest is in
`lowtide.extensions.moves.store`.
"""
