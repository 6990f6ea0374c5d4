"""Whose gradient a tensor of backward is, and which tensors are attention scores, read off the step graph.

In: a `StepGraph`. Out: ids of values that the forward made. A graph does not say which node of autograd ran
an operation; so each answer rests on what it reads, and where that fits several lines there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from lowtide.graph import Operation, StepGraph

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul"})
_FACTORS = frozenset({"mul"}) | _PRODUCTS
"""Operations whose gradient of one argument is worked out from the other."""

_SUMS = frozenset({"add", "add_"})
_PASS_ON = frozenset({"clone", "_to_copy", "cat"}) | _SUMS
"""Operations whose result is a gradient of what their arguments are gradients of."""

_OTHER_NAMES = {"relu": "threshold"}
_SOFTMAX = frozenset({"_softmax", "_safe_softmax"})


def _base(op: Operation) -> str:
    """The name without namespace and overload: ``mm`` of ``aten.mm.default``."""
    return op.name.split(".")[1] if op.name.count(".") else op.name


class Origins:
    """Answers for one step.

    Args:
        graph: the step.

    Attributes:
        scores: ids of the values that are attention scores: between two products of batches of matrices, with
            a softmax among what is done to each number by itself.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self._forward = [op for op in graph.operations if op.phase == "forward"]
        self._touches: dict[int, list[Operation]] = {}
        self._readers: dict[int, list[Operation]] = {}
        for op in self._forward:
            for value in {*op.reads, *op.writes}:
                self._touches.setdefault(value, []).append(op)
            for value in op.reads:
                self._readers.setdefault(value, []).append(op)
        self._known: dict[int, tuple[int, ...]] = {}
        self.scores = frozenset(
            value for op in self._forward if _base(op) in _SOFTMAX for value in self._around(op)
        )
        for op in graph.operations:
            if op.phase == "backward":
                for value in op.writes:  # what it reads is known by now
                    self._known[value] = self._find(value, op)

    def of(self, value: int) -> tuple[int, ...]:
        """The values of the forward that this value of backward may be the gradient of; none where nothing is
        known.
        """
        return self._known.get(value, ())

    def maker(self, value: int) -> tuple[str | None, str]:
        """The module and the line that made what this value of backward is the gradient of: ``None`` and an
        empty text where these are not known, or not one.
        """
        made = [op for one in self.of(value) if (op := self._producer(one)) is not None]
        modules, lines = {op.module for op in made}, {op.source for op in made}
        return (modules.pop() if len(modules) == 1 else None), (lines.pop() if len(lines) == 1 else "")

    def _producer(self, value: int) -> Operation | None:
        index = self.graph.values[value].producer
        return None if index is None else self.graph.operations[index]

    def _count(self, value: int) -> int:
        return math.prod(self.graph.values[value].shape)

    def _made(self, value: int, others: Iterable[int]) -> list[int]:
        """Those that the forward made, of the same dtype."""
        values = self.graph.values
        makers = {
            other: self._producer(other) for other in others if values[other].dtype == values[value].dtype
        }
        return [other for other, op in makers.items() if op is not None and op.phase == "forward"]

    def _alike(self, value: int, others: Iterable[int]) -> list[int]:
        """Those that the forward made, with as many numbers of the same dtype."""
        return [other for other in self._made(value, others) if self._count(other) == self._count(value)]

    def _find(self, value: int, op: Operation) -> tuple[int, ...]:
        if not self.graph.values[value].shape:
            return ()
        gradients = [read for read in op.reads if self._of_backward(read)]
        others = [read for read in op.reads if read not in gradients]
        if _base(op) in _FACTORS:  # the gradient of the loss is made before backward begins
            others = [read for read in others if read in self._readers]
        if not others and _base(op) in _PASS_ON:
            found = {self.of(read) for read in gradients}
            if _base(op) in _SUMS and () not in found:  # autograd adds up where paths meet: at the first
                return (min(min(one) for one in found),) if found else ()
            return found.pop() if len(found) == 1 else ()
        views = _base(op) in _PRODUCTS or "attention" in _base(op)  # as of q, k and v in one value
        all_found: dict[int, None] = {}
        for call in self._calls(op, others):
            rest = [read for read in call.reads if _base(op) not in _FACTORS or read not in others]
            made = self._made(value, rest or call.reads)
            large = [read for read in made if self._count(read) >= self._count(value)] if views else []
            all_found |= dict.fromkeys(self._alike(value, made) or large)
        return tuple(all_found)

    def _calls(self, op: Operation, values: list[int]) -> list[Operation]:
        """Operations of the forward that an operation of backward may belong to, by their names and by these
        values that it reads: those that read or wrote most of them.
        """
        shared: dict[int, int] = {}
        touches = self._readers if _base(op) in _FACTORS else self._touches
        for value in values:
            for call in touches.get(value, ()):
                if _goes_with(op, call):
                    shared[call.index] = shared.get(call.index, 0) + 1
        most = max(shared.values(), default=0)
        if _base(op) in _FACTORS and most < len(values):
            return []
        calls = [self.graph.operations[index] for index, count in shared.items() if count == most]
        here = [call for call in calls if call.module == op.module]
        return here or calls

    def _of_backward(self, value: int) -> bool:
        op = self._producer(value)
        return op is not None and op.phase == "backward"

    def _around(self, softmax: Operation) -> set[int]:
        """The scores of the attention that this softmax is of; none where it is of something else."""
        scores = set(self._alike(softmax.writes[0], softmax.writes[:1])) if softmax.writes else set()
        ends = 0
        for following in (self._makers_of_reads, self._written_by_readers):
            stack, met, is_product = list(scores), set(scores), False
            while stack:
                value = stack.pop()
                for op, values in following(value):
                    is_product |= _base(op) in ("bmm", "baddbmm")
                    new = set() if _base(op) in _PRODUCTS else {*self._alike(value, values)} - met
                    met |= new
                    stack += new
            scores, ends = scores | met, ends + is_product
        return scores if ends == 2 else set()

    def _makers_of_reads(self, value: int) -> list[tuple[Operation, tuple[int, ...]]]:
        op = self._producer(value)
        return [] if op is None else [(op, op.reads)]

    def _written_by_readers(self, value: int) -> list[tuple[Operation, tuple[int, ...]]]:
        return [(op, op.writes) for op in self._readers.get(value, ())]


def _goes_with(backward: Operation, forward: Operation) -> bool:
    """Whether an operation may be one of those that are the backward of another, by their names."""
    name, other = _base(backward), _base(forward).removesuffix("_")
    if name in _FACTORS:
        return other == name or {name, other} <= _PRODUCTS
    return name.removesuffix("_data") == f"{_OTHER_NAMES.get(other, other)}_backward"
