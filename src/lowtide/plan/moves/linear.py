"""Which saved values backward uses linearly: there a rounding without bias leaves the gradients without bias.

Rounding at random makes the expected *value* exact. The expected *gradient* is exact, too, where every
gradient is an affine function of the value: where backward multiplies gradients with it, once, as a matrix
product does for the weight's gradient (the argument of ActNN, arXiv 2104.14129, section 3.1, Theorem 1, made
per value). A value that goes through a function first (a layer norm's or an activation's input, a softmax's
output, the logarithm of one in the loss) gives E[f(x + e)] = f(x) + f''(x) E[e^2] / 2 + ...: a bias that
grows with the square of the error, so it asks for a small one.

In: a step graph. Out: the values in which it is affine, followed operation by operation through backward. Two
facts carry this: a gradient is linear in the gradients above it, so that only the operation where the value
meets a gradient has to be known; and what is not known counts as not linear.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

from lowtide.graph import Operation, StepGraph

_ADDS = frozenset(
    {
        "add", "add_", "sub", "sub_", "rsub", "neg", "neg_", "sum", "mean", "clone", "copy", "copy_",
        "_to_copy", "to", "contiguous", "cat",
        "stack", "constant_pad_nd", "pad", "index_select", "index", "gather", "repeat", "roll", "flip",
        "tril", "triu", "masked_fill",
        "masked_fill_", "slice_backward", "select_backward", "slice_scatter", "select_scatter", "zeros_like",
        "new_zeros",
        "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "wait_tensor", "_allgather_base_",
        "_reduce_scatter_base_", "allreduce_",
    }
)  # fmt: skip
"""Operations whose result is linear in their tensors taken together."""

_MULTIPLIES = frozenset(
    {
        "mm", "addmm", "addmm_", "bmm", "baddbmm", "addbmm", "matmul", "linear", "linear_backward", "mv",
        "addmv", "dot", "outer", "einsum", "mul", "mul_",
        "convolution", "convolution_backward", "_grouped_mm", "native_dropout_backward",
    }
)  # fmt: skip
"""Operations whose result is linear in each of their tensors alone."""


def linear_values(graph: StepGraph) -> frozenset[int]:
    """Ids of the saved values, made in the forward, in which every gradient of the step is affine.

    Example:
        >>> import torch, lowtide
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        >>> x = torch.randn(3, 8)
        >>> graph = lowtide.trace(lambda: net(x).square().sum(), model=net)
        >>> sorted(graph.operations[graph.values[value].producer].name for value in linear_values(graph))
        ['aten.gelu.default']
    """
    saved = {s.value for s in graph.saved if s.droppable and graph.values[s.value].producer is not None}
    bit = {value: 1 << k for k, value in enumerate(sorted(saved))}
    copies = dict(bit)
    """value -> the saved values that it is linear in without being a gradient"""
    carried: dict[int, int] = {}
    """gradient -> the saved values that it has been multiplied with"""
    gradients = _roots(graph)
    read = refused = 0
    for op in graph.operations:
        if op.phase != "backward":
            continue
        name = _bare(op)
        given = [copies.get(u, 0) for u in op.reads]
        among = [carried.get(u, 0) for u in op.reads]
        direct = _any(given)
        read |= direct
        if name in _MULTIPLIES:
            refused |= _twice([a | b for a, b in zip(given, among, strict=True)])
            if len(op.reads) == 1 and name not in ("mul", "mul_"):
                refused |= direct | _any(among)  # a tensor times itself, not by a number
        elif name not in _ADDS:
            refused |= direct
        is_gradient = any(u in gradients for u in op.reads)
        for w in op.writes:
            if is_gradient:
                gradients.add(w)
                carried[w] = direct | _any(among)
            else:
                copies[w] = copies.get(w, 0) | direct | _any(among)
    return frozenset(value for value, mine in bit.items() if mine & read and not mine & refused)


def _roots(graph: StepGraph) -> set[int]:
    """The gradient that backward begins with: ones, made right before it."""
    first = next((op.index for op in graph.operations if op.phase == "backward"), 0)
    before = graph.operations[first - 1] if first else None
    return set(before.writes) if before is not None and _bare(before) == "ones_like" else set()


def _bare(op: Operation) -> str:
    parts = op.name.split(".")
    return parts[1] if len(parts) > 1 else op.name


def _any(masks: list[int]) -> int:
    return reduce(or_, masks, 0)


def _twice(masks: list[int]) -> int:
    """Bits that stand in two of the masks."""
    seen = again = 0
    for mask in masks:
        again |= seen & mask
        seen |= mask
    return again
