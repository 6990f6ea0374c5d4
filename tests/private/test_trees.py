"""Containers in containers are walked as lowtide expects."""

from __future__ import annotations

import torch

from lowtide import private


def test_trees() -> None:
    tree = ({"a": 1, "b": [2, torch.ones(1)]}, 3)
    leaves, structure = private.tree_flatten(tree)
    assert leaves[:2] == [1, 2] and leaves[3] == 3 and private.tree_leaves(tree)[:2] == [1, 2]
    assert structure == private.tree_flatten(({"a": 5, "b": [6, 7]}, 8))[1]
    assert hash(structure) == hash(private.tree_flatten(({"a": 5, "b": [6, 7]}, 8))[1])
    assert private.tree_map(lambda item: 0, tree) == ({"a": 0, "b": [0, 0]}, 0)
    mapped = private.tree_map_only(torch.Tensor, lambda tensor: "t", tree)
    assert mapped == ({"a": 1, "b": [2, "t"]}, 3)
