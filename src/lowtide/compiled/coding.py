"""Codecs in compiled code: what forward hands to backward in fewer bytes.

A saved value is encoded in the forward graph right after its last reader there, and decoded in the backward
graph right before its first. ``bfloat16`` is a change of type, which Inductor fuses with what stands around
it. ``int8`` and ``int4`` are operations of our own, the eager engine's codecs: they work in chunks, and
rounding without bias draws numbers that are no part of the program's.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from lowtide.compiled.handing import Parts, call, geometry, hand_over
from lowtide.errors import PlanError, expect
from lowtide.ops import covers_storage
from lowtide.store.codec import Blockwise, ceil_div

_PARTS = ("codes", "ranges")

CODECS = ("bfloat16", "int8", "int4")
"""Those that compiled code knows."""

_Convert = torch.ops.prims.convert_element_type.default


def check_codecs(codecs: Sequence[str]) -> tuple[str, ...]:
    """The codecs, where compiled code knows them.

    Raises:
        PlanError: one is unknown.
    """
    expect(isinstance(codecs, Sequence), "compile(codecs=)", codecs, f"some of {', '.join(CODECS)}")
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
        forward, backward, forward_outputs: as of `lowtide.compiled.handing.hand_over`.
        codecs: name of a saved node -> codec. What varies in size or does not lie densely stays as it is.
    """

    def fits(node: fx.Node) -> bool:
        return node.name in codecs and _fits(node.meta["val"], codecs[node.name])

    def send(going: list[fx.Node], output: fx.Node) -> Parts:
        return {node: _encoded(node, codecs[node.name], output) for node in going}

    def receive(received: Parts) -> None:
        for value, parts in received.items():
            value.replace_all_uses_with(_decoded(value, codecs[value.name], parts))

    return hand_over(forward, backward, forward_outputs, fits, send, receive)


def _fits(value: torch.Tensor, name: str) -> bool:
    if not value.dtype.is_floating_point:
        return False
    if name == "bfloat16":
        return value.dtype in (torch.float32, torch.float64)
    sizes = (*value.shape, *value.stride())
    return all(isinstance(size, int) for size in sizes) and covers_storage(value)


def _encoded(node: fx.Node, name: str, output: fx.Node) -> list[fx.Node]:
    """The nodes that stand for a value from its last reader in the forward on."""
    graph = node.graph
    with graph.inserting_before(max([node, *(one for one in node.users if one is not output)]).next):
        if name == "bfloat16":
            return [call(graph, f"{node.name}_coded", _Convert, node, torch.bfloat16)]
        made = call(graph, f"{node.name}_coded", torch.ops.lowtide.encode.default, node, _bits(name))
        parts = [
            call(graph, f"{node.name}_{part}", operator.getitem, made, at) for at, part in enumerate(_PARTS)
        ]
    return parts


def _decoded(value: fx.Node, name: str, parts: Sequence[fx.Node]) -> fx.Node:
    """The value, before its first reader in the backward."""
    graph = value.graph
    with graph.inserting_before(min(value.users)):
        if name == "bfloat16":
            return call(graph, f"{value.name}_decoded", _Convert, *parts, value.meta["val"].dtype)
        decode, arguments = torch.ops.lowtide.decode.default, (*parts, _bits(name), *geometry(value))
        return call(graph, f"{value.name}_decoded", decode, *arguments)


def _bits(name: str) -> int:
    return int(name.removeprefix("int"))
