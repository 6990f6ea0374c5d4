"""How an operation's cost follows its size: what is read off other sizes of the same call, and which part of
a heavy call is enough to run.

Calls of one family have the same operation, dtypes, layouts and other arguments. Of two of them that were
run, one in between takes the power law's time; where a call is far above what any call takes, one up to four
times as large, or as small, takes its time in proportion. Scratch is a part of the exact peak, so it is never
guessed: it carries over where it does not change with size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from lowtide.private import tree_leaves, tree_map
from lowtide.trace.specs import OpCost, OpSpec, TensorSpec, runnable

SIZABLE_SECONDS = 1e-3
"""A call that takes so long is far above what any call takes."""

_SIZABLE_BYTES = 1 << 24  # what touches so much does not live in the processor's cache
_REACH = 4.0  # how far beyond a measured size proportion is trusted
_BETWEEN = 16.0  # how far apart two measured sizes may lie
_COMPUTES = 64.0  # floating-point operations for each byte from which a call's time does not depend on memory
_ALIKE = 1.25  # calls that do less for each byte are alike within this factor
_DIMENSION = 4  # integers up to this are dimensions or choices, larger ones are sizes
_NARROW = 512  # a product that is narrower than this runs slower

_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2)}
"""Products of matrices, with the positions of their two."""

_ROWS = frozenset({
    "bmm", "baddbmm", "cat", "_softmax", "_log_softmax", "_softmax_backward_data",
    "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "native_dropout", "sum",
    "mean", "_to_copy", "copy_",
})  # fmt: skip
"""What treats the parts of its leading dimensions alike, beside everything pointwise."""

_ATTENTION = re.compile("scaled_dot_product.*attention")
"""Attention, which has results of lower rank that share the leading two dimensions: batch and heads."""


def scratch_of(part: OpCost, larger: OpCost, work: int) -> int | None:
    """Scratch bytes of a call of so much work, from two parts of it, if they say: it has to be the same, or
    to grow in a straight line.
    """
    if not part.scratch_bytes and not larger.scratch_bytes:
        return 0
    run, rise = work_of(larger) - work_of(part), larger.scratch_bytes - part.scratch_bytes
    if run <= 0 or rise < 0 or rise * (work - work_of(part)) % run:
        return None
    return part.scratch_bytes + rise * (work - work_of(part)) // run


def family_of(spec: OpSpec) -> str:
    """What calls that differ in size alone share; empty for what is not run here, or has no tensors."""
    if not runnable(spec.func) or not spec.tensors() or spec.trues:
        return ""
    return " ".join([str(spec.func), *map(_look, tree_leaves((spec.args, spec.kwargs)))])


def _look(leaf: Any) -> str:
    if isinstance(leaf, TensorSpec):
        sized = [k for k, size in enumerate(leaf.shape) if size > 1]
        order = sorted(sized, key=lambda k: (-leaf.stride[k], k))
        places = "".join(str(sized.index(k)) if leaf.stride[k] else "x" for k in order)
        return f"{leaf.dtype}{leaf.device.type}[{places}]{'' if _dense(leaf) else '~'}@{leaf.storage_key}"
    if isinstance(leaf, int) and not isinstance(leaf, bool) and abs(leaf) > _DIMENSION:
        return "n"
    return repr(leaf)


def read_off(known: Iterable[OpCost], flops: int, touched: int) -> tuple[float, int] | None:
    """Seconds and scratch bytes of a call of so many floating-point operations and bytes, from calls of its
    family; ``None`` where they do not say.

    Args:
        known: costs of calls of the family.
        flops, touched: the call's size.

    Example:
        >>> from lowtide.trace.specs import OpCost
        >>> runs = [OpCost(0.010, 0, "measured", "neg", 0, 100 << 20),
        ...     OpCost(0.040, 0, "measured", "neg", 0, 400 << 20)]
        >>> seconds, scratch = read_off(runs, 0, 200 << 20)
        >>> round(seconds, 3), scratch
        (0.02, 0)
    """
    work = flops or touched
    if not work:
        return None
    points = [
        cost
        for cost in known
        if cost.source in ("measured", "scaled") and _alike(cost, flops, touched) and cost.seconds > 0
    ]
    below = max((c for c in points if work_of(c) <= work), key=work_of, default=None)
    above = min((c for c in points if work_of(c) >= work), key=work_of, default=None)
    if below is not None and above is not None:
        if below.scratch_bytes != above.scratch_bytes or work_of(above) > _BETWEEN * work_of(below):
            return None
        if work_of(above) == work_of(below):
            return (below.seconds + above.seconds) / 2, below.scratch_bytes
        share = math.log(work / work_of(below)) / math.log(work_of(above) / work_of(below))
        return below.seconds * (above.seconds / below.seconds) ** share, below.scratch_bytes
    near = below or above
    if near is None or near.scratch_bytes or near.seconds < SIZABLE_SECONDS:
        return None
    ratio = work / work_of(near)
    if (
        not 1 / _REACH <= ratio <= _REACH
        or min(near.bytes, touched) < _SIZABLE_BYTES
        or near.seconds * ratio < SIZABLE_SECONDS
    ):
        return None
    return near.seconds * ratio, 0


def work_of(cost: OpCost) -> int:
    """What a call's time grows with: floating-point operations, or bytes."""
    return cost.flops or cost.bytes


def _alike(cost: OpCost, flops: int, touched: int) -> bool:
    """Whether computing, or else moving bytes, is what both calls' time goes to."""
    if bool(cost.flops) != bool(flops):
        return False
    if not flops:
        return cost.bytes > 0
    here, there = flops / max(1, touched), cost.flops / max(1, cost.bytes)
    return min(here, there) >= _COMPUTES or max(here, there) <= _ALIKE * min(here, there)


def parts(spec: OpSpec, share: float) -> tuple[OpSpec, OpSpec] | None:
    """The same call on about a ``share`` of its work, and on about twice that; ``None`` where it cannot be
    divided.
    """
    if (
        not runnable(spec.func)
        or spec.trues
        or any(leaf.device.type != "cpu" or leaf.storage_key < 0 for leaf in spec.tensors())
    ):
        return None
    name = spec.func.overloadpacket.__name__

    def of(share: float) -> OpSpec | None:
        return _product(spec, share, *_PRODUCTS[name]) if name in _PRODUCTS else _rows(spec, share, name)

    small = of(share)
    if small is None or small == spec:
        return None
    while True:
        share *= 2
        larger = of(share)
        if larger is None or larger != small:
            return None if larger is None else (small, larger)


def _product(spec: OpSpec, share: float, left: int, right: int) -> OpSpec | None:
    """Fewer rows of the left matrix, or a shorter inner dimension, whichever is the longer one."""
    a, b = spec.args[left], spec.args[right]
    long = 0 if a.shape[0] >= a.shape[1] else 1
    size = max(_NARROW, int(a.shape[long] * share) // 16 * 16)
    if left and long == 0 and len(spec.args[0].shape) == 2:
        return None  # what is added has rows of its own
    if size >= a.shape[long]:
        return spec
    args = list(spec.args)
    args[left] = _cut(a, long, size)
    if long:
        args[right] = _cut(b, 0, size)
    return replace(
        spec,
        args=tuple(args),
        output_bytes=spec.output_bytes if long else spec.output_bytes * size // a.shape[0],
    )


def _rows(spec: OpSpec, share: float, name: str) -> OpSpec | None:
    """Less of the leading dimensions, which all tensors have; all where there is none."""
    attends = bool(_ATTENTION.search(name))
    if torch.Tag.pointwise not in spec.func.tags and name not in _ROWS and not attends:
        return None
    tensors = spec.tensors()
    rank = max(len(leaf.shape) for leaf in tensors)
    ranks = (rank, rank - 1) if attends else (rank,)
    full = [leaf for leaf in tensors if len(leaf.shape) in ranks]
    # what is of lower rank is broadcast over the leading dimensions
    lower = max(
        (len(leaf.shape) for leaf in tensors if len(leaf.shape) not in ranks),
        default=rank - 2 if attends else 0,
    )
    found, left = spec, share
    for d in range(min(rank - lower, rank - 1)):  # the last one is what a row is
        sizes = {leaf.shape[d] for leaf in full if leaf.shape[d] != 1}
        if len(sizes) > 1:
            break
        for whole in sizes:
            size = math.ceil(whole * left)
            less = _less(found, ranks, d, size, whole) if size < whole else found
            if list(map(_dense, less.tensors())) != list(map(_dense, tensors)):
                return found  # another layout would be another call
            found, left = less, left * whole / size
            if size > 1:
                return found
    return found


def _dense(leaf: TensorSpec) -> bool:
    """Whether it has no gaps."""
    return leaf.extent_bytes - leaf.offset * leaf.dtype.itemsize <= leaf.bytes


def _less(spec: OpSpec, ranks: tuple[int, ...], d: int, size: int, whole: int) -> OpSpec:
    def smaller(leaf: Any) -> Any:
        return (
            _cut(leaf, d, size)
            if isinstance(leaf, TensorSpec) and len(leaf.shape) in ranks and leaf.shape[d] == whole
            else leaf
        )

    args, kwargs = tree_map(smaller, (spec.args, spec.kwargs))
    return replace(spec, args=args, kwargs=kwargs, output_bytes=spec.output_bytes * size // whole)


def _cut(leaf: TensorSpec, d: int, size: int) -> TensorSpec:
    shape = (*leaf.shape[:d], size, *leaf.shape[d + 1 :])
    cut = replace(leaf, shape=shape)
    return replace(cut, storage_bytes=min(leaf.storage_bytes, cut.extent_bytes))
