"""Scopes: regions of any forward that keep only their inputs. `checkpointing` is a block of code,
`checkpoint` a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import noop_context_fn

from lowtide import private
from lowtide.errors import PlanError, expect
from lowtide.interception import watchers
from lowtide.run.record.directors import RegionDirector
from lowtide.run.record.verify import Verify, check_verify
from lowtide.run.scope.reproduced import ScopeRecorder
from lowtide.run.scope.rules import RegionPolicy, director_for, selective


def checkpointing(policy: RegionPolicy = None, *, verify: Verify = "first") -> AbstractContextManager[None]:
    """Keep only what enters the block; recompute the rest when backward first needs it.

    Nothing of the model's Python runs twice: recorded operations are replayed below autograd, with their
    random state, each once, and those that nobody needs are not. Regions nest (the inner one rules what lies
    in it) and may be conditional. A region that backward never reaches costs nothing. Without gradients the
    block does nothing.

    Args:
        policy: ``None`` or ``"full"`` evicts everything, ``"keep_all"`` nothing (to except a part of an outer
            region). A list of operations (``[torch.ops.aten.gelu]``, or their names) evicts their results. A
            function is asked once for each operation, with its name, or with the operation, its arguments and
            its keyword arguments, whether to evict its results.
        verify: ``first`` runs every operation twice where the region runs for the first time, or other
            operations or shapes than before, compares, and checks what is replayed by digests; what does not
            reproduce is kept, and named in a warning. ``always`` does so every time, ``never`` trusts. Inside
            another scope or a limited model that one's ``verify`` holds.

    Raises:
        PlanError: a policy that needs a step graph or names no operation that can be seen; a fake tensor mode
            that is active without a trace of lowtide's.
        ReplayError: in backward, when an operation did not reproduce or a source was overwritten.

    Source: OneFlow's checkpointing pass, which keeps a scope's inputs and orders the replay behind its first
        backward consumer.

    Example:
        >>> import torch, lowtide
        >>> layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        >>> with lowtide.checkpointing():
        ...     y = torch.nn.functional.gelu(layer(x))
        >>> y.sum().backward()
    """
    check_verify(verify)
    return _scope(director_for(policy), verify, _place(sys._getframe(1)))


def checkpoint(
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
    """Call ``function(*args, **kwargs)`` and keep only what enters it.

    This is the call of `torch.utils.checkpoint.checkpoint`, done by a scope (see `checkpointing`). The
    function's Python runs once. What runs again are the operations that backward needs, with the random
    state of the forward.

    Args:
        function: what to call.
        args, kwargs: what to call it with.
        use_reentrant: ``None`` or ``False``.
        preserve_rng_state: ``True``; random states are always those of the forward.
        context_fn: ``None``, or a policy of selective checkpointing:
            ``functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy)``.
        determinism_check: ``default`` compares bit by bit where the function runs for the first time, or with
            other shapes than before; ``none`` trusts.
        debug: ``False``; an operation that does not reproduce is named anyway.
        early_stop: ``True``; what nobody needs is never replayed.

    Returns:
        What the function returns.

    Raises:
        PlanError: ``function`` is none, or a value of these options that has no meaning here; the message
            says which to drop.
        ReplayError: as of `checkpointing`.

    Source: the call is that of `torch.utils.checkpoint.checkpoint`.

    Example:
        >>> import torch, lowtide
        >>> layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        >>> lowtide.checkpoint(lambda h: torch.nn.functional.gelu(layer(h)), x).sum().backward()
    """
    expect(callable(function), "checkpoint(function=)", function, "a function, and then its arguments")
    refused = refusal_of(use_reentrant, preserve_rng_state, determinism_check, debug, early_stop)
    if refused is not None:
        raise PlanError(refused)
    plain = context_fn is None or context_fn is noop_context_fn
    director = RegionDirector() if plain else selective(context_fn)  # pyright: ignore
    name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    place = hash((_place(sys._getframe(1)), *name))
    with _scope(director, "first" if determinism_check == "default" else "never", place):
        return function(*args, **kwargs)


def refusal_of(
    use_reentrant: bool | None,
    preserve_rng_state: bool,
    determinism_check: str,
    debug: bool,
    early_stop: bool,
) -> str | None:
    """Why an option of `checkpoint` has no meaning here, and what to do; ``None`` where all have one."""
    dropped = [
        (use_reentrant, "use_reentrant", "backward is never run inside backward: drop it, or give False"),
        (not preserve_rng_state, "preserve_rng_state", "random states are always the forward's: drop it"),
        (debug, "debug", "an operation that does not reproduce is named anyway: drop it"),
        (not early_stop, "early_stop", "what nobody needs is never replayed: drop it"),
    ]
    for refused, name, why in dropped:
        if refused:
            return f"lowtide.checkpoint({name}={name in ('use_reentrant', 'debug')}): {why}"
    if determinism_check in ("default", "none"):
        return None
    return (
        f"lowtide.checkpoint(determinism_check={determinism_check!r}): use 'default' or 'none', or "
        "lowtide.checkpointing(verify='always')"
    )


def _place(frame: Any) -> int:
    """A number for the line of code that a frame is at."""
    return hash((frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno))


@contextmanager
def _scope(director: RegionDirector, verify: Verify, place: int) -> Iterator[None]:
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        yield
        return
    watcher = next((one for one in reversed(watchers()) if hasattr(one, "region")), None)
    if watcher is not None:
        with watcher.region(director):
            yield
        return
    if private.is_fake_mode_active():
        raise PlanError(
            "checkpointing() cannot record on fake tensors: trace the step with lowtide.trace(..., fake=True)"
        )
    with ScopeRecorder(director, verify, place).recording():
        yield
