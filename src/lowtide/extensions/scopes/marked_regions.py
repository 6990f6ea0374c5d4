"""Regions that the user has marked in a model, `lowtide.checkpoint` and `lowtide.checkpointing`, in compiled
code.

Neither can run there. Dynamo traces other functions in their place: `torch.utils.checkpoint` for a call, and
for a block a note on the calls in it, which `lowtide.private.partitioning.clean_joint` reads.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.traceback import annotate
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lowtide.errors import PlanError
from lowtide.extensions.scopes.scope import checkpoint, checkpointing, refusal_of
from lowtide.private.partitioning import REGION, region_of


@torch.compiler.assume_constant_result
def _new_region() -> int:
    """A number for a region; they rise."""
    return time.monotonic_ns()


@torch.compiler.assume_constant_result
def _refusal(*options: Any) -> str | None:
    return refusal_of(*options)


@functools.cache
def honour_regions() -> None:
    """From now on Dynamo takes marked regions into its graphs."""

    @torch.compiler.substitute_in_graph(checkpoint, skip_signature_check=True)  # type: ignore[arg-type]
    def traced_checkpoint(
        function: Callable[..., Any],
        *args: Any,
        use_reentrant: bool | None = None,
        preserve_rng_state: bool = True,
        context_fn: Callable[..., Any] | None = None,
        determinism_check: str = "default",
        debug: bool = False,
        early_stop: bool = True,
        **kwargs: Any,
    ) -> Any:
        refused = _refusal(use_reentrant, preserve_rng_state, determinism_check, debug, early_stop)
        if refused is not None:
            raise PlanError(refused)
        if context_fn is None:
            return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
        return torch_checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    @torch.compiler.substitute_in_graph(checkpointing, skip_signature_check=True)  # type: ignore[arg-type]
    def traced_checkpointing(policy: Any = None, *, verify: str = "first") -> Any:
        if policy == "keep_all":
            return annotate({REGION: 0})
        if policy is not None and policy != "full":
            raise PlanError("lowtide.checkpointing: compiled code takes None, 'full' or 'keep_all'")
        return annotate({REGION: _new_region()})


def wishes_of(module: torch.fx.GraphModule) -> str:
    """A digest of the regions marked in Dynamo's graph: they are no part of its code, and so of no key."""
    numbers: dict[int, int] = {}
    rows = [
        (node.name, numbers.setdefault(region, len(numbers)))
        for node in module.graph.nodes
        if (region := region_of(node))
    ]
    return hashlib.sha256(repr(rows).encode()).hexdigest() if rows else ""
