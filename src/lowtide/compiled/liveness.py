"""Live bytes of a graph that runs call by call, exactly: a result goes when its last reader has run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lowtide.compiled.moving import arriving_bytes
from lowtide.private import partitioning, tree_leaves


@dataclass(frozen=True)
class Profile:
    """What a forward or backward does to memory.

    Attributes:
        peak_bytes: the most live bytes at any moment, what it is given included where it lets go of that.
        end_bytes: what it returns, as far as it made or was given it.
        given_bytes: what it is given and lets go of: of a backward, what the forward stored.
        copied: names of inputs that stand anyway, of which it returns copies laid out anew -> their bytes.
    """

    peak_bytes: int
    end_bytes: int
    given_bytes: int
    copied: Mapping[str, int] = field(default_factory=dict)


def profile(
    module: fx.GraphModule,
    lent: Collection[str],
    scratch: Callable[[fx.Node], int] = lambda node: 0,
    size_of: Callable[[Any], int] = partitioning.hint,
    surplus: Mapping[str, int] = MappingProxyType({}),
) -> Profile:
    """Live bytes of ``module`` run call by call.

    Args:
        module: forward or backward.
        lent: names of inputs that stand anyway, before and after: parameters, the user's tensors.
        scratch: bytes that a call takes beyond its results while it runs.
        size_of: a size as a number, where the graph leaves it open.
        surplus: names of nodes -> what their storages take beyond what the graph says.
    """
    nodes = list(module.graph.nodes)
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[source] = at
        if node.op != "placeholder" and node not in last:
            last[node] = at
        elif node.op == "placeholder":
            last.setdefault(node, 0)
    dies: dict[int, list[fx.Node]] = {}
    for node, at in last.items():
        dies.setdefault(at, []).append(node)
    holders: dict[int, int] = {}
    size: dict[int, int] = {}
    standing: set[int] = set()
    live = peak = given = 0

    def take(node: fx.Node) -> None:
        nonlocal live
        for storage, count in _storages(node.meta.get("val"), size_of).items():
            if storage in standing:
                continue
            if not holders.get(storage):
                size[storage] = count + surplus.get(node.name, 0)
                live += size[storage]
            holders[storage] = holders.get(storage, 0) + 1

    for node in nodes:
        if node.op == "placeholder" and node.name in lent:
            standing.update(_storages(node.meta.get("val"), size_of))
    for node in nodes:
        if node.op == "placeholder":
            take(node)
    given = peak = live
    for at, node in enumerate(nodes):
        if node.op == "output":
            break
        if node.op in ("call_function", "get_attr"):
            live += arriving_bytes(node.target, node.args)
            take(node)
            peak = max(peak, live + (scratch(node) if node.op == "call_function" else 0))
        for dead in dies.get(at, ()):
            for storage in _storages(dead.meta.get("val"), size_of):
                if storage in standing:
                    continue
                holders[storage] -= 1
                if not holders[storage]:
                    live -= size[storage]
    return Profile(peak, live, given)


def _storages(value: Any, size_of: Callable[[Any], int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            address = partitioning.storage_of(leaf)
            if address is not None:
                found[address] = size_of(leaf.untyped_storage().nbytes())
    return found
