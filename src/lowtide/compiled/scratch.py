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


class Bench:
    """Runs each kind of call once, on made-up inputs, and remembers what it took."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, operation: Any, args: Any, kwargs: Any) -> int:
        """Bytes of one call's scratch, as measured."""
        spec = described_call(operation, args, kwargs, partitioning.hint)
        key = repr(spec)
        if key not in self._known:
            self._known[key] = measure_scratch(spec)
        return self._known[key]


class Scratch:
    """Scratch of the calls of one generated text, in their order.

    Args:
        bench: what runs them.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._first: list[tuple[int, int]] | None = None  # bytes given, bytes taken

    def run(self) -> Ask:
        """For one run of the text. In the first each call is measured; where later ones have other sizes,
        what a call takes grows with what it is given.
        """
        before = None if self._first is None else iter(self._first)
        taken: list[tuple[int, int]] = []
        if before is None:
            self._first = taken

        def ask(operation: Any, args: Any, kwargs: Any) -> int:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if not runnable(operation) or not tensors or op_info(operation).is_view:
                return coding.scratch_bytes(operation, args)
            given = sum(one.nbytes for one in tensors)
            if before is None:
                taken.append((given, self._bench(operation, args, kwargs)))
                return taken[-1][1]
            then, took = next(before)
            return -(-took * given // then) if then else took

        return ask
