"""Parts of a module's name, as the page groups by them."""

from __future__ import annotations

from lowtide.plan.split.blocks import block_of


def layer_of(module: str) -> str:
    """The layer that a module is part of: its name up to the first number, or the first part of its name.

    >>> layer_of("model.layers.3.mlp.up"), layer_of("head.norm"), layer_of("")
    ('model.layers.3', 'head', '')
    """
    return block_of(module) or module.split(".")[0]


def part_of(module: str) -> str:
    """What a module is within any layer: its name behind the layer's.

    >>> part_of("model.layers.3.mlp.up"), part_of("head"), part_of("model.layers.3")
    ('mlp.up', 'head', 'layers')
    """
    layer = layer_of(module)
    inside = module[len(layer) + 1 :]
    if inside or not block_of(module):
        return inside or layer
    return layer.split(".")[-2] if "." in layer else layer
