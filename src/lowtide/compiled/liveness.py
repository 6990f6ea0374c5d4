"""Live bytes of a graph that runs call by call, exactly: a result goes when its last reader has run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lowtide.compiled.moving import arriving_bytes
from lowtide.private import partitioning, tree_leaves


@dataclass(frozen=True)
class Traffic:
    """What generated kernels are given.

    Attributes:
        bytes: of everything but masks.
        masks_written, masks_read: elements of boolean tensors that a kernel is the first to be given, and
            that it is given later.
    """

    bytes: int = 0
    masks_written: int = 0
    masks_read: int = 0


@dataclass(frozen=True)
class Profile:
    """What a forward or backward does to memory.

    Attributes:
        peak_bytes: the most live bytes at any moment, what it is given included where it lets go of that.
        end_bytes: what it returns, as far as it made or was given it.
        copied: names of inputs that stand anyway, of which it returns copies laid out anew -> their bytes.
        traffic: of its generated kernels.
    """

    peak_bytes: int
    end_bytes: int
    copied: Mapping[str, int] = field(default_factory=dict)
    traffic: Traffic = Traffic()


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
    readers = {node: len(node.users) for node in nodes}  # that are still to run
    holders: Counter[int] = Counter()
    size: dict[int, int] = {}
    standing: set[int] = set()
    live = 0

    def take(node: fx.Node) -> None:
        nonlocal live
        for storage, count in _storages(node.meta.get("val"), size_of).items():
            if storage not in standing:
                if not holders[storage]:
                    size[storage] = count + surplus.get(node.name, 0)
                    live += size[storage]
                holders[storage] += 1

    def let_go(node: fx.Node) -> None:
        nonlocal live
        for storage in _storages(node.meta.get("val"), size_of):
            if storage not in standing:
                holders[storage] -= 1
                if not holders[storage]:
                    live -= size[storage]

    given = [node for node in nodes if node.op == "placeholder"]
    for node in given:
        if node.name in lent:
            standing.update(_storages(node.meta.get("val"), size_of))
    for node in given:
        take(node)
    peak = live
    for node in nodes:
        if node.op == "output":
            break
        if node.op in ("call_function", "get_attr"):
            live += arriving_bytes(node.target, node.args)
            take(node)
            peak = max(peak, live + (scratch(node) if node.op == "call_function" else 0))
        for source in node.all_input_nodes:
            readers[source] -= 1
            if not readers[source]:
                let_go(source)
        if not node.users:
            let_go(node)
    return Profile(peak, live)


def _storages(value: Any, size_of: Callable[[Any], int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            address = partitioning.storage_of(leaf)
            if address is not None:
                found[address] = size_of(leaf.untyped_storage().nbytes())
    return found
