"""Containers in containers, and what lies in them: `torch.utils._pytree`.

Seen in PyTorch 2.11 to 2.13.
"""

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only"]
