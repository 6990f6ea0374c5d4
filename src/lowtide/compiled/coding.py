"""Codecs in compiled code: what forward hands to backward in fewer bytes.

A saved value is encoded in the forward graph right after its last reader there, and decoded in the backward
graph right before its first. ``bfloat16`` is a change of type, which Inductor fuses with what stands around
it. ``int8`` and ``int4`` are operations of our own, the eager engine's codecs: they work in chunks, and
rounding without bias draws numbers that are no part of the program's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from lowtide.errors import PlanError
from lowtide.ops import covers_storage
from lowtide.store.codec import Blockwise
from lowtide.store.coding import ceil_div

CODECS = ("bfloat16", "int8", "int4")
"""Those that compiled code knows."""

_Convert = torch.ops.prims.convert_element_type.default


def check_codecs(codecs: Sequence[str]) -> tuple[str, ...]:
    """The codecs, where compiled code knows them.

    Raises:
        PlanError: one is unknown.
    """
    given = (codecs,) if isinstance(codecs, str) else tuple(codecs)
    for name in given:
        if name not in CODECS:
            raise PlanError(f"codecs: compiled code knows no {name!r}: give some of {', '.join(CODECS)}")
    return given


@cache
def _blockwise(bits: int) -> Blockwise:
    """One of a kind in a process: each value is rounded with other random numbers."""
    return Blockwise(bits)


@torch.library.custom_op("lowtide::encode", mutates_args=())
def encode(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A dense tensor's codes, and each block's least number and step."""
    flat = x.detach().as_strided((x.numel(),), (1,), x.storage_offset())
    codes, ranges = _blockwise(bits).encode(flat)
    return codes, ranges


@encode.register_fake
def _(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = x.numel()
    return (
        x.new_empty(ceil_div(count * bits, 8), dtype=torch.uint8),
        x.new_empty(2 * ceil_div(count, _blockwise(bits).block), dtype=torch.bfloat16),
    )


@torch.library.custom_op("lowtide::decode", mutates_args=())
def decode(
    codes: torch.Tensor,
    ranges: torch.Tensor,
    bits: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """What `encode` encoded, with this geometry."""
    made = torch.empty_strided(size, stride, dtype=dtype, device=codes.device)
    _blockwise(bits).decode((codes, ranges), made.as_strided((made.numel(),), (1,)))
    return made


@decode.register_fake
def _(codes: torch.Tensor, ranges: Any, bits: Any, size: Any, stride: Any, dtype: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=codes.device)


def scratch_bytes(operation: Any, args: Sequence[Any]) -> int:
    """What a call allocates beyond its results while it runs, where it encodes or decodes; else 0."""
    if operation is torch.ops.lowtide.encode.default:
        elements, bits, device = args[0].numel(), args[1], args[0].device
    elif operation is torch.ops.lowtide.decode.default:
        elements, bits, device = args[0].numel() * 8 // args[2], args[2], args[0].device
    else:
        return 0
    return _blockwise(bits).scratch(elements, device.type)


def coded(
    forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int, codecs: Mapping[str, str]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Hand some saved values over in fewer bytes.

    Args:
        forward, backward: the halves of a joint graph, changed in place.
        forward_outputs: how many of the forward's outputs are the caller's; the others are saved.
        codecs: name of a saved node -> codec. What is not saved, is returned anyway, varies in size or does
            not lie densely stays as it is.
    """
    output = next(iter(reversed(forward.graph.nodes)))
    given: list[Any] = list(output.args[0])
    returned, saved = given[:forward_outputs], given[forward_outputs:]
    handed: list[Any] = []
    inputs = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    for node in saved:
        name = codecs.get(getattr(node, "name", ""))
        if name is None or node in returned or not _fits(node.meta["val"], name):
            handed.append(node)
            continue
        parts = _encoded(forward.graph, node, name, output)
        handed += parts
        _decoded(backward.graph, inputs[node.name], name, parts)
    output.args = ([*returned, *handed], *output.args[1:])
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return forward, backward


def _fits(value: torch.Tensor, name: str) -> bool:
    if not value.dtype.is_floating_point:
        return False
    if name == "bfloat16":
        return value.dtype in (torch.float32, torch.float64)
    sizes = (*value.shape, *value.stride())
    return all(isinstance(size, int) for size in sizes) and covers_storage(value)


def _encoded(graph: fx.Graph, node: fx.Node, name: str, output: fx.Node) -> list[fx.Node]:
    """The nodes that stand for a value from its last reader in the forward on."""
    place = {one: at for at, one in enumerate(graph.nodes)}
    last = max((one for one in node.users if one is not output), key=place.__getitem__, default=node)
    with graph.inserting_after(max(last, node, key=place.__getitem__)):
        if name == "bfloat16":
            return [call(graph, f"{node.name}_coded", _Convert, (node, torch.bfloat16))]
        made = call(graph, f"{node.name}_coded", torch.ops.lowtide.encode.default, (node, _bits(name)))
    parts: list[fx.Node] = []
    after = made
    for at, part in enumerate(("codes", "ranges")):
        with graph.inserting_after(after):
            after = graph.create_node(
                "call_function", operator.getitem, (made, at), name=f"{node.name}_{part}"
            )
        after.meta["val"] = made.meta["val"][at]
        parts.append(after)
    return parts


def _decoded(graph: fx.Graph, given: fx.Node, name: str, parts: Sequence[fx.Node]) -> None:
    """Read the parts where backward reads the value."""
    handed: list[fx.Node] = []
    for part in parts:
        with graph.inserting_before(given):
            twin = graph.placeholder(part.name)
        twin.meta["val"] = part.meta["val"]
        handed.append(twin)
    place = {one: at for at, one in enumerate(graph.nodes)}
    value = given.meta["val"]
    with graph.inserting_before(min(given.users, key=place.__getitem__)):
        if name == "bfloat16":
            made = call(graph, f"{given.name}_decoded", _Convert, (*handed, value.dtype))
        else:
            geometry = (list(value.shape), list(value.stride()), value.dtype)
            arguments = (*handed, _bits(name), *geometry)
            made = call(graph, f"{given.name}_decoded", torch.ops.lowtide.decode.default, arguments)
    given.replace_all_uses_with(made)
    graph.erase_node(given)


def _bits(name: str) -> int:
    return int(name.removeprefix("int"))


def call(graph: fx.Graph, name: str, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    """A call in a graph, with what it gives."""
    node = graph.create_node("call_function", target, args, name=name)
    values = [one.meta["val"] if isinstance(one, fx.Node) else one for one in args]
    with torch.no_grad():
        node.meta["val"] = target(*values)
    return node
