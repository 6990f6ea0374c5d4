"""Bring back an evicted value: replay recorded operations, starting from values that are there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from lowtide import private
from lowtide.errors import ReplayError
from lowtide.interception import compiled_recorder, unseen
from lowtide.ops import op_info
from lowtide.run.digest import words_of
from lowtide.run.record.random_draws import drawn_again
from lowtide.run.record.tape import Fetch, LiveValue, Node, Ref, SparseInput, Writer


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
    if base is not None:
        return base
    order: list[Writer] = []
    seen: set[int] = set()
    # values that this call makes; those with readers left stay cached afterwards
    transient: dict[int, torch.Tensor] = {}
    stack = [value]
    while stack:
        wanted = stack.pop()
        node = wanted.node
        if node is None or id(node) in seen:
            continue
        if wanted.here() is not None:
            if wanted.cached is not None:
                # its last reader may read it, and drop it, before this call needs it
                transient[id(wanted)] = wanted.cached
            continue
        seen.add(id(node))
        order.append(node)
        stack.extend(node.inputs)
    order.sort(key=lambda node: node.order)
    uses = Counter(id(source) for node in order for source in node.inputs)
    uses[id(value)] += 1
    with unseen(), private.replaying():
        for node in order:
            private.set_grad_enabled(node.grad)
            _run(node, transient, uses)
    found = transient.pop(id(value), None)
    if found is None:
        found = value.cached
    if found is None:
        raise ReplayError(
            f"replaying {order[-1].func} did not produce the value asked for: please report this"
        )
    return found


def _run(node: Writer, transient: dict[int, torch.Tensor], uses: Counter[int]) -> None:
    """Run one recorded operation again, or fetch a moved value, and cache its outputs for their readers."""
    if isinstance(node, Fetch):
        assert node.output is not None
        _place(node.output(), node.fetch(), transient, uses)
        return
    assert isinstance(node, Node)
    substitutes: dict[int, torch.Tensor] = {}
    inputs = node.inputs
    for one in node.written:
        ref, old = one.ref, one.ref.value
        if not one.reads:
            blank = torch.empty(old.nbytes, dtype=torch.uint8, device=node.device)
            base = ref.over(blank.untyped_storage())
        else:
            base = transient.get(id(old))
            if base is None:
                base = old.here()
            assert base is not None
            if old.held is not None or old.readers > 1 or uses[id(old)] > 1:
                whole = words_of(base, torch.uint8, base.untyped_storage().nbytes())
                base = ref.over(whole.clone().untyped_storage())
        substitutes[id(ref)] = base

    if node.call is not None:
        flat = compiled_recorder().again(node.call, [_base(node, value, transient) for value in inputs])
    else:
        args = [_argument(node, item, substitutes, transient) for item in node.args]
        kwargs = {name: _argument(node, item, substitutes, transient) for name, item in node.kwargs.items()}
        for position in node.statistics:
            args[position] = args[position].clone()
        flat = flat_results(run_again(node, args, kwargs))
        del args, kwargs
    for position, output in node.outputs:
        _place(output(), flat[position], transient, uses)
    for one in node.written:
        if one.new is not None:
            _place(one.new(), substitutes[id(one.ref)], transient, uses)
    del flat, substitutes
    node.has_read()
    for source in inputs:
        uses[id(source)] -= 1
        if uses[id(source)] <= 0:
            transient.pop(id(source), None)


def _argument(
    node: Node, item: Any, substitutes: dict[int, torch.Tensor], transient: dict[int, torch.Tensor]
) -> Any:
    """A recorded argument with tensors in place of references."""
    if isinstance(item, Ref):
        base = substitutes.get(id(item))
        return item.view(_base(node, item.value, transient) if base is None else base)
    if isinstance(item, SparseInput):
        return item.here()
    if isinstance(item, list):
        return [_argument(node, part, substitutes, transient) for part in item]
    return item


def _base(node: Node, value: LiveValue, transient: dict[int, torch.Tensor]) -> torch.Tensor:
    """A tensor on a value that a replay reads."""
    base = transient.get(id(value))
    if base is None:
        base = value.here()
    if base is None:
        raise ReplayError(f"{node.func} lacks an input in its replay: please report this")
    return base


def _place(
    value: LiveValue | None, tensor: torch.Tensor, transient: dict[int, torch.Tensor], uses: Counter[int]
) -> None:
    if value is None:
        return
    if value.readers > 0 and value.cached is None:
        value.cached = tensor
    if uses[id(value)] > 0:
        transient[id(value)] = tensor


def run_again(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operation with its recorded random state, and restore the generator; wait for a collective."""
    if node.random_state is None:
        result = node.func(*args, **kwargs)
        return private.wait_for_collective(result) if op_info(node.func).collective else result
    return drawn_again(node, tuple(args), kwargs)
