"""What the operations that generated code calls take beyond their results while they run: a convolution's
workspace, for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.compiled import coding
from lowtide.ops import op_info
from lowtide.private import partitioning, tree_leaves
from lowtide.trace.costs.measure import measure_scratch
from lowtide.trace.costs.specs import described_call, runnable

Ask = Callable[[Any, Any, Any], int]
"""Scratch of one call: the operation, its arguments and its keyword arguments, as fake tensors."""


class Scratch:
    """Scratch of the calls of one generated text, in their order.

    Args:
        known: what each kind of call took, by its description; shared with other texts.
    """

    def __init__(self, known: dict[str, int]) -> None:
        self._known = known
        self._first: list[tuple[int, int]] = []  # bytes given, bytes taken

    def run(self) -> Ask:
        """For one run of the text. In the first each kind of call is run once, on made-up inputs; where later
        ones have other sizes, what a call takes grows with what it is given.
        """
        before, first = iter(self._first), not self._first

        def ask(operation: Any, args: Any, kwargs: Any) -> int:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if not runnable(operation) or not tensors or op_info(operation).is_view:
                return coding.scratch_bytes(operation, args)
            given = sum(one.nbytes for one in tensors)
            if not first:
                then, took = next(before)
                return -(-took * given // then) if then else took
            spec = described_call(operation, args, kwargs, partitioning.hint)
            if (key := repr(spec)) not in self._known:
                self._known[key] = measure_scratch(spec)
            self._first.append((given, self._known[key]))
            return self._known[key]

        return ask
