"""Run an operation a second time, at once, and compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from lowtide import private
from lowtide.errors import PlanError
from lowtide.ops import Call, has_plain_storage
from lowtide.run.digest import same_bytes
from lowtide.run.record.replay import flat_results, run_again
from lowtide.run.record.values import Node

Verify = Literal["first", "always", "never"]


def check_verify(verify: str) -> None:
    """Raise a `PlanError` where this is no `Verify`."""
    if verify not in ("first", "always", "never"):
        raise PlanError(f"verify={verify!r} is not known: use 'first', 'always' or 'never'")


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the same layout: a kernel may round differently in another one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def why_not_reproduced(
    node: Node,
    call: Call,
    flat: list[Any],
    before: list[tuple[torch.Tensor, torch.Tensor]],
    around: Callable[[Callable[[], Any]], Any],
) -> str:
    """Why a second run of an operation differs from the first, or an empty text.

    Args:
        node: the recorded operation.
        call: the first run.
        flat: its results.
        before: each tensor that it overwrote, with a copy from before.
        around: makes the call of the second run, to measure it.
    """
    args, kwargs = list(call.args), call.kwargs
    try:
        if before:
            copies = {id(tensor): copy for tensor, copy in before}
            args, kwargs = private.tree_map_only(torch.Tensor, lambda t: copies.get(id(t), t), (args, kwargs))
        with private.replaying():
            again = flat_results(around(lambda: run_again(node, args, kwargs)))
    except RuntimeError as error:
        return f"its second run raised {type(error).__name__}: {error}"
    results = [pair for at, pair in enumerate(zip(flat, again, strict=True)) if at not in call.loose]
    pairs = [(a, b) for a, b in results if isinstance(a, torch.Tensor)] + before
    for first, second in pairs:
        if has_plain_storage(first) and not same_bytes(first, second):
            return "a second run with equal inputs gave other bytes"
    return ""
