"""Calls described without their tensors, and what one run of such a call costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from lowtide import private
from lowtide.ops import has_plain_storage, tensors_of
from lowtide.private import OpOverload, tree_leaves, tree_map
from lowtide.trace.costs.roofline import outside_modes

Signature = tuple[Any, ...]
"""A key that calls share whose arguments differ in contents alone (`signature_of`)."""

_RUN_NAMESPACES = frozenset({"aten", "prims"})
_NEVER_RUN = frozenset({
    "aten::from_file", "aten::record_stream", "aten::_pin_memory", "aten::_print",
    "aten::_nested_tensor_from_mask",
    # a made-up workspace crashes them
    "aten::mkldnn_rnn_layer_backward", "aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward",
})  # fmt: skip


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention
    ],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
}
"""The CPU's attention, which `torch.utils.flop_counter` does not know."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument without its contents.

    Attributes:
        storage_bytes: bytes of the storage that it is a view of.
        dtype, shape, stride: as the tensor's.
        offset: its storage offset, in elements.
        device: where it lies.
        storage_key: leaves of one operation with equal keys share one storage.
    """

    storage_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    storage_key: int

    @property
    def bytes(self) -> int:
        """Bytes that reading it touches: an expanded tensor has fewer than its elements would say."""
        own = [size for size, stride in zip(self.shape, self.stride, strict=True) if stride or not size]
        return math.prod(own) * self.dtype.itemsize

    @property
    def extent_bytes(self) -> int:
        """The fewest bytes that the tensor's storage can have."""
        if 0 in self.shape:
            return 0
        last = self.offset + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)
        )
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One call: the overload and its arguments, with a `TensorSpec` in place of every tensor.

    Attributes:
        func: the ATen (or custom) overload.
        args, kwargs: its arguments.
        output_bytes: bytes of the storages that it allocates for its outputs, 0 when not known.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    output_bytes: int = 0

    def tensors(self) -> list[TensorSpec]:
        """The tensor leaves, in argument order."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, TensorSpec)]

    def input_bytes(self) -> int:
        """Bytes of the distinct input storages."""
        sizes: dict[int, int] = {}
        for leaf in self.tensors():
            sizes[leaf.storage_key] = max(
                sizes.get(leaf.storage_key, 0), leaf.storage_bytes, leaf.extent_bytes
            )
        return sum(sizes.values())


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one run of an operation costs.

    Attributes:
        seconds: time of one run, the Python call included.
        scratch_bytes: the most it allocates beyond its outputs while it runs; where estimated, only what a
            collective moves through.
        source: ``measured`` where the operation was run, ``estimated`` by a roofline where it was not.
        surplus_bytes: what the storages of its outputs take beyond what was expected: a loss may lie in what
            its terms were written to.
    """

    seconds: float
    scratch_bytes: int
    source: Literal["measured", "estimated"]
    surplus_bytes: int = 0


def runnable(func: OpOverload) -> bool:
    """Whether an operation may be run beside the step: ATen's own only, for others may talk to other
    processes or to the world.
    """
    return func.namespace in _RUN_NAMESPACES and private.schema_of(func).name not in _NEVER_RUN


def flops(spec: OpSpec) -> int:
    """Floating-point operations as `torch.utils.flop_counter` counts them, the CPU's attention besides; 0
    where it knows none.
    """
    formula = _ATTENTION.get(spec.func.overloadpacket) or flop_registry.get(spec.func.overloadpacket)
    if formula is None:
        return 0
    try:
        args, kwargs, out = _on_meta(spec, runnable(spec.func))
        return int(formula(*args, **kwargs, out_val=out))
    except Exception:  # a formula that does not fit the call, or no meta kernel: not known is 0
        return 0


def likely_flops(spec: OpSpec) -> int:
    """As `flops`; of an operation that nobody has given a formula and that may not be run, what the largest
    product of two of its inputs takes that has the shape of an output, an output at a time.

    Tensors share an index where they share a size: one that only one of the three has is picked from, one
    that two or three have is gone through once. That is exact for matrix products, batched and grouped, with
    their backward, and for element-wise operations. Attention of one shape is taken for one of the latter.
    """
    known = flops(spec)
    if known or runnable(spec.func) or not private.has_kernel_at(spec.func.name(), "Meta"):
        return known
    given = [_sizes(leaf.shape) for leaf in spec.tensors() if leaf.dtype.is_floating_point]
    try:
        made = [_sizes(one.shape) for one in tensors_of(_on_meta(spec)[2])]
    except Exception:  # a kernel that wants to know what the tensors hold
        return 0
    pairs = list(combinations(given, 2)) or [(one, Counter()) for one in given]
    return sum(max((2 * _product(one + two + out) for one, two in pairs), default=0) for out in made)


def _on_meta(spec: OpSpec, runs: bool = True) -> tuple[Any, Any, Any]:
    """A call's arguments without memory, and what it returns for them where it runs."""
    with outside_modes(), torch.no_grad():
        args, kwargs = tree_map(_meta, (spec.args, spec.kwargs))
        return args, kwargs, spec.func(*args, **kwargs) if runs else None


def _sizes(shape: Iterable[int]) -> Counter[int]:
    return Counter(size for size in shape if size > 1)


def _product(sizes: Counter[int]) -> int:
    return math.prod(size ** (count // 2) for size, count in sizes.items())


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def signature_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, OpSpec]:
    """A hashable key that equal calls share, and the same call with tensors described instead of held."""
    spec = described_call(func, args, kwargs)
    return (func, spec.args, tuple(sorted(spec.kwargs.items()))), spec


def described_call(
    func: Any, args: Any, kwargs: dict[str, Any], size_of: Callable[[Any], int] = int, output_bytes: int = 0
) -> OpSpec:
    """A call with tensors described instead of held; ``size_of`` makes numbers of sizes that are not yet
    known.
    """
    keys: dict[int, int] = {}
    described = tuple(_describe(item, keys, size_of) for item in args)
    named = {name: _describe(item, keys, size_of) for name, item in kwargs.items()}
    return OpSpec(func, described, named, output_bytes)


_AS_THEY_ARE = (int, float, str, bool, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _describe(item: Any, keys: dict[int, int], size_of: Callable[[Any], int]) -> Any:
    """An argument with tensors described; ``keys`` numbers the storages of the call in order of
    appearance.
    """
    if isinstance(item, torch.Tensor):
        if not has_plain_storage(item):
            return TensorSpec(0, item.dtype, tuple(map(size_of, item.shape)), (), 0, item.device, -1)
        storage = item.untyped_storage()
        number = keys.setdefault(private.storage_address(storage), len(keys))
        shape, strides = tuple(map(size_of, item.shape)), tuple(map(size_of, item.stride()))
        bytes_, offset = size_of(storage.nbytes()), size_of(item.storage_offset())
        return TensorSpec(bytes_, item.dtype, shape, strides, offset, item.device, number)
    if isinstance(item, (tuple, list)):
        return tuple(_describe(part, keys, size_of) for part in item)
    if isinstance(item, torch.SymInt):
        return size_of(item)
    if item is None or isinstance(item, _AS_THEY_ARE):
        return item
    return repr(item) if not isinstance(item, torch.Generator) else None


def staging_bytes(spec: OpSpec) -> int:
    """Bytes that Gloo allocates for a functional collective of CPU tensors beyond the result, from its start
    until it has ended.

    An all-gather lands in one flat tensor and is copied from there to the result. A reduce-scatter sums a
    copy of its input. An all-reduce works in the result. Collectives of tensors on a device move through
    buffers that NCCL keeps for the whole run: 0.

    >>> import torch
    >>> from lowtide.trace.costs.specs import OpSpec
    >>> staging_bytes(OpSpec(torch.ops.aten.relu.default, (), {}, 64))
    0
    """
    tensors = spec.tensors()
    if spec.func.namespace != "_c10d_functional" or not tensors or tensors[0].device.type != "cpu":
        return 0
    name = private.schema_of(spec.func).name.removeprefix("_c10d_functional::")
    return {"all_gather_into_tensor": spec.output_bytes, "reduce_scatter_tensor": spec.input_bytes()}.get(
        name, 0
    )
