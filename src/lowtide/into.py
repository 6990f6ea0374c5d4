"""Which operations write their result into memory that they are given, how, and what the result looks like.

Below autograd `op.out(..., out=t)` is legal for any `t`. But many of these overloads are generated: they compute the result elsewhere and copy it.
Only those with a kernel of their own for the device count here, copies (which write into new memory anyway), memory that is not filled, and ReLU, which
is `clamp_min`. Random operations do not: what they write is their own business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from lowtide import private
from lowtide.ops import may_stand_on_more, op_info, tensors_of

_COPIES = {"aten.clone.default", "aten._to_copy.default"}
_EMPTY = {"aten.empty_like.default"}
_RELU = "aten.relu.default"
_CONTIGUOUS = {"aten.native_batch_norm.default": 0}
"""Operations whose result looks as one on the device ``meta`` does only where this argument is contiguous."""

_TENSORS = (torch.Tensor, torch.nn.Parameter)
Call = Callable[[Any, Any, dict[str, Any]], Any]
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)


class Geometry(NamedTuple):
    """What a tensor looks like, which fills its storage to the byte."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class Unknown(Exception):
    """An argument that says nothing about what the result looks like."""


@dataclass(frozen=True, slots=True)
class Into:
    """How an operation writes into memory that it is given.

    Attributes:
        func: the operation.
        kind: ``out`` for an overload with a kernel of its own, ``copy``, ``empty``, ``relu``.
        out: what is called instead of it.
        names: of the arguments that are given the memory, one for each result.

    Example:
        >>> into = into_of(torch.ops.aten.mul.Tensor, "cpu")
        >>> memory = torch.empty(3)
        >>> into.run((torch.ones(3), 2.0), {}, (memory,)) is memory
        True
        >>> memory
        tensor([2., 2., 2.])
        >>> into_of(torch.ops.aten.native_layer_norm.default, "cpu") is None
        True
    """

    func: Any
    kind: Literal["out", "copy", "empty", "relu"]
    out: Any
    names: tuple[str, ...]

    def looks(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Geometry, ...] | None:
        """What the results of a call look like; ``None`` where that is not known, or they do not fill their storages."""
        if any(t.is_complex() or t.is_quantized for t in (*tensors_of(args), *tensors_of(kwargs))):
            return None
        position = _CONTIGUOUS.get(op_info(self.func).name)
        if position is not None and not args[position].is_contiguous():
            return None
        if kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
            return None
        rest = {name: item for name, item in kwargs.items() if name != "device"}
        try:
            with private.without_modes():
                if self.kind == "empty":
                    rest["device"] = "meta"
                found = self.func(*_on_meta(args), **_on_meta(rest))
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # what has no meta kernel stays where it is
            return None
        results = found if isinstance(found, (tuple, list)) else (found,)
        if len(results) != len(self.names):
            return None
        looks = tuple(Geometry(tuple(t.shape), t.stride(), t.dtype, t.nbytes) for t in results)
        return looks if all(_fills(look) for look in looks) else None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], memory: Sequence[torch.Tensor], call: Call = private.call) -> Any:
        """The call, with its results in ``memory``, one tensor for each.

        Args:
            args, kwargs: of the operation.
            memory: looks as the results do, and shares no byte with the arguments.
            call: calls an operation with its arguments.
        """
        if self.kind == "out":
            call(self.out, args, {**kwargs, **dict(zip(self.names, memory, strict=True))})
        elif self.kind == "copy":
            call(self.out, (memory[0], args[0]), {})
        elif self.kind == "relu":
            call(self.out, (args[0], 0), {"out": memory[0]})
        return memory[0] if len(self.names) == 1 else tuple(memory)


@cache
def into_of(func: Any, device: str) -> Into | None:
    """How ``func`` writes into given memory on a kind of device, or ``None`` where it does not.

    Args:
        func: an overload.
        device: its kind, ``cpu`` or ``cuda``.
    """
    info = op_info(func)
    if func.namespace != "aten" or info.written or info.is_view or info.random or info.reason:
        return None
    if info.real_only or info.loose or may_stand_on_more(info):
        return None
    if info.name in _COPIES:
        return Into(func, "copy", torch.ops.aten.copy_.default, ("out",))
    if info.name in _EMPTY:
        return Into(func, "empty", None, ("out",))
    if info.uninitialized:
        return None
    if info.name == _RELU:
        return Into(func, "relu", torch.ops.aten.clamp_min.out, ("out",))
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        outs = [a for a in other._schema.arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        if not outs or rest != wanted or len(outs) != len(func._schema.returns):
            continue
        if torch.Tag.generated not in other.tags and private.has_kernel(other, device):
            return Into(func, "out", other, tuple(a.name for a in outs))
    return None


def overload(name: str) -> Any | None:
    """The overload of that qualified name, for example ``aten.addmm.default``; ``None`` where this PyTorch has none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def form_of(args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> tuple[Any, ...]:
    """All of a call that tells what its results look like, to be looked up by.

    Raises:
        Unknown: that cannot be said, or the call is about another device.
    """
    found: list[Any] = []
    for item in (*args, *kwargs.items()) if kwargs else args:
        if isinstance(item, torch.Tensor):
            if type(item) not in _TENSORS or item.layout is not torch.strided or item.is_nested or item._is_zerotensor():
                raise Unknown
            if item.device != device and item.dim():
                raise Unknown
            found += (item.shape, item.stride(), item.dtype)
        elif isinstance(item, (list, tuple)):
            found.append(form_of(item, {}, device))
        elif isinstance(item, _PLAIN):
            if isinstance(item, torch.device) and item != device:
                raise Unknown
            found += (type(item), item)
        else:
            raise Unknown
    return tuple(found)


def _on_meta(items: Any) -> Any:
    if isinstance(items, torch.Tensor):
        return torch.empty_strided(items.shape, items.stride(), dtype=items.dtype, device="meta")
    if isinstance(items, dict):
        return {name: _on_meta(item) for name, item in items.items()}
    return type(items)(_on_meta(item) for item in items) if isinstance(items, (list, tuple)) else items


def _fills(look: Geometry) -> bool:
    """Whether the elements lie one behind the other, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(((n, s) for n, s in zip(look.shape, look.stride, strict=True) if n != 1), key=lambda pair: pair[1]):
        if stride != expected:
            return False
        expected *= size
    return look.bytes > 0
