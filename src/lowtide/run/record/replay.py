"""Bring back an evicted value: replay recorded operations, starting from values that are there."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch

from lowtide import private
from lowtide.errors import ReplayError
from lowtide.interception import compiled_recorder, unseen
from lowtide.ops import op_info
from lowtide.run.digest import words_of
from lowtide.run.record.random_draws import drawn_again
from lowtide.run.record.tape import Fetch, LiveValue, Node, Overwrite, Ref, SparseInput, Writer


def flat_results(result: Any) -> list[Any]:
    """The results of an operation as a flat list."""
    if isinstance(result, (tuple, list)):
        return [part for item in result for part in (item if isinstance(item, (tuple, list)) else (item,))]
    return [result]


def bring_back(value: LiveValue) -> torch.Tensor:
    """A tensor on the bytes of ``value``, after the replays that it takes.

    Operations run in forward order, each once. An output with readers left is cached with its value, and
    dropped after the last of them. Without readers left (a second backward over a retained graph) nothing is
    cached beyond this call.

    Raises:
        ReplayError: the replay starts from a tensor that was overwritten or freed.
    """
    base = value.here()
    return Replay(value).run() if base is None else base


class Replay:
    """One replay of all that a value takes.

    Attributes:
        order: the nodes that run.
        made: tensors on the values that they write, and on cached ones, whose last reader may drop them
            before they are needed here.
        uses: how often each value is still to be used; then it is no longer in ``made``.
    """

    def __init__(self, value: LiveValue) -> None:
        self.value = value
        self.order: list[Writer] = []
        self.made: dict[int, torch.Tensor] = {}
        stack, seen = [value], set[int]()
        while stack:
            wanted = stack.pop()
            node = wanted.node
            if node is None or id(node) in seen:
                continue
            if wanted.here() is None:
                seen.add(id(node))
                self.order.append(node)
                stack.extend(node.inputs)
            elif wanted.cached is not None:
                self.made[id(wanted)] = wanted.cached
        self.order.sort(key=lambda node: node.order)
        self.uses = Counter(id(source) for node in self.order for source in node.inputs)
        self.uses[id(value)] += 1

    def run(self) -> torch.Tensor:
        """A tensor on the value."""
        with unseen(), private.replaying():
            for node in self.order:
                private.set_grad_enabled(node.grad)
                if isinstance(node, Fetch):
                    self._place(node.output, node.fetch())
                else:
                    self._run(node)
        found = self.made.get(id(self.value))
        if found is None:
            raise ReplayError(
                f"replaying {self.order[-1].func} did not produce the value asked for: please report this"
            )
        return found

    def _run(self, node: Node) -> None:
        """Run one recorded operation again, and cache its outputs for their readers."""
        overwritten = {id(one.ref): self._overwritten(node, one) for one in node.written}
        if node.call is not None:
            flat = compiled_recorder().again(node.call, [self._base(node, value) for value in node.inputs])
        else:
            args = [self._argument(node, item, overwritten) for item in node.args]
            kwargs = {name: self._argument(node, item, overwritten) for name, item in node.kwargs.items()}
            for position in node.statistics:
                args[position] = args[position].clone()
            flat = flat_results(run_again(node, args, kwargs))
            del args, kwargs
        for position, output in node.outputs:
            self._place(output, flat[position])
        for one in node.written:
            self._place(one.new, overwritten[id(one.ref)])
        del flat, overwritten
        node.drop_inputs()
        for source in node.inputs:
            self.uses[id(source)] -= 1
            if self.uses[id(source)] <= 0:
                self.made.pop(id(source), None)

    def _overwritten(self, node: Node, one: Overwrite) -> torch.Tensor:
        """What the operation may write to: the old value itself, if nobody else waits for it."""
        ref, old = one.ref, one.ref.value
        if not one.reads:
            blank = torch.empty(old.nbytes, dtype=torch.uint8, device=node.device)
            return ref.over(blank.untyped_storage())
        base = self._base(node, old)
        if old.held is None and old.readers <= 1 and self.uses[id(old)] <= 1:
            return base
        whole = words_of(base, torch.uint8, base.untyped_storage().nbytes())
        return ref.over(whole.clone().untyped_storage())

    def _argument(self, node: Node, item: Any, overwritten: dict[int, torch.Tensor]) -> Any:
        """A recorded argument with tensors in place of references."""
        if isinstance(item, Ref):
            base = overwritten.get(id(item))
            return item.view(self._base(node, item.value) if base is None else base)
        if isinstance(item, SparseInput):
            return item.here()
        if isinstance(item, list):
            return [self._argument(node, part, overwritten) for part in item]
        return item

    def _base(self, node: Node, value: LiveValue) -> torch.Tensor:
        """A tensor on a value that the replay reads."""
        base = self.made.get(id(value))
        if base is None:
            base = value.here()
        if base is None:
            raise ReplayError(f"{node.func} lacks an input in its replay: please report this")
        return base

    def _place(self, reference: weakref.ref[LiveValue] | None, tensor: torch.Tensor) -> None:
        """Keep a tensor that was written while its value has readers."""
        value = reference() if reference is not None else None
        if value is None:
            return
        if value.readers > 0 and value.cached is None:
            value.cached = tensor
        if self.uses[id(value)] > 0:
            self.made[id(value)] = tensor


def run_again(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operation with its recorded random state, and restore the generator; wait for a collective."""
    if node.noted is None:
        result = node.func(*args, **kwargs)
        return private.wait_for_collective(result) if op_info(node.func).collective else result
    return drawn_again(node, tuple(args), kwargs)
