"""Which layer of its model a module is part of, told from the names of the step's modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache


def layers_of(modules: Iterable[str]) -> dict[str, str]:
    """Each of a step's modules, by name -> the layer that it is part of.

    Layers are the members of the model's outermost lists, and what stands beside the lists. Where no two
    members of a list are alike and there are lists of alike ones in them, as in ``Sequential(encoder, head)``
    and in stages, the members of these are layers.

    >>> layers_of(["wte", "h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "h.1"])
    {'wte': 'wte', 'h.0.attn': 'h.0', 'h.0.mlp': 'h.0', 'h.1.attn': 'h.1', 'h.1.mlp': 'h.1', 'h.1': 'h.1'}
    """
    names = list(modules)
    inside: dict[str, set[str]] = defaultdict(set)  # a module -> names of what runs in it
    members: dict[str, set[str]] = defaultdict(set)  # a list -> its members
    for name in names:
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            inside[".".join(parts[:k])].add(".".join(parts[k:]))
            if parts[k - 1].isdigit():
                members[".".join(parts[: k - 1])].add(".".join(parts[:k]))

    def lists_in(module: str) -> list[str]:
        return [one for one in members if one == module or one.startswith(module + ".")]

    @cache
    def alike(of_list: str) -> bool:
        """Whether two members of a list are made of the same modules, of several each."""
        made = [frozenset(inside[member]) for member in members[of_list]]
        return any(made.count(one) > 1 and len(one) > 1 for one in made)

    def holds_layers(module: str) -> bool:
        return any(map(alike, lists_in(module)))

    @cache
    def is_layer(module: str) -> bool:
        before, _, last = module.rpartition(".")
        if not last.isdigit():
            return not lists_in(module)
        if len(members[before]) == 1 or alike(before) or not any(map(holds_layers, members[before])):
            return True
        return not any(len(inside[member]) > 1 for one in lists_in(module) for member in members[one])

    def layer_of(name: str) -> str:
        parts = name.split(".")
        upto = (".".join(parts[:k]) for k in range(1, len(parts)))
        return next((module for module in upto if is_layer(module)), name)

    return {name: layer_of(name) for name in names}


def part_of(module: str, layer: str) -> str:
    """What a module is within any layer: its name behind the layer's.

    >>> part_of("model.layers.3.mlp.up", "model.layers.3"), part_of("head", "head"), part_of("h.3", "h.3")
    ('mlp.up', 'head', 'h')
    """
    if module != layer:
        return module[len(layer) + 1 :]
    before, _, last = layer.rpartition(".")
    return before.rpartition(".")[2] if before and last.isdigit() else layer
