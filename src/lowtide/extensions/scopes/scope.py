"""Scopes: regions of any forward that keep only their inputs. `checkpointing` is a block of code,
`checkpoint` a call, `ScopeRecorder` what runs in both.

A scope has no step graph, so its recorder verifies what runs for the first time, and remembers what
reproduced. Each operation has a fingerprint: a hash of the place in user code, the operations so far, the
shapes, types and parameters that they read, and which of them were recorded. An operation with a new
fingerprint runs twice, to be verified; one with a known fingerprint is trusted. So every block of a model is
verified in its first step, and again when its shapes or its operations change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import noop_context_fn

from lowtide import private
from lowtide.errors import PlanError, ReplayError, expect
from lowtide.extensions.scopes.rules import ScopePolicy, director_for, selective
from lowtide.interception import watchers
from lowtide.ops import Call, op_info
from lowtide.run.messages import warn
from lowtide.run.record.directors import ScopeDirector
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.special import Verify, check_verify
from lowtide.run.record.tape import Node, Tape

MOST_FINGERPRINTS = 1 << 17

IN_SCOPE = (
    "this limited model runs inside lowtide.checkpoint or checkpointing(), which decides what is kept: "
    "its budget is not held. Remove the scope, or put the limit on a module around both"
)


@cache
def _fingerprints() -> dict[int, bool]:
    """Whether an operation reproduced, by its fingerprint. No model owns these facts about code; fingerprints
    hold addresses of parameters, so those of two models differ.
    """
    return {}


class ScopeTape(Tape):
    """The tape of one scope: it verifies what is new, and remembers which operations reproduced, by
    fingerprint.

    Args:
        mode, place: as of `ScopeRecorder`, whose ``verify`` is the mode.

    Attributes:
        mode: as given.
        fingerprint: of the operation that runs.
        reproduces_by: whether an operation reproduced, by its fingerprint, as found in this scope.
        news: findings that no warning has told of yet.
        wanted: whether the operation that runs was to be recorded.
        withdrawn: code wrote to what the scope had recorded, unseen; the next run is verified, too.
    """

    def __init__(self, mode: Verify, place: int) -> None:
        super().__init__(mode != "never")
        self.mode: Verify = mode
        self.fingerprint = place
        self.reproduces_by: dict[int, bool] = {}
        self.news: dict[str, str] = {}
        self.wanted = self.withdrawn = False

    def operation_begins(self, func: Any, args: tuple[Any, ...]) -> None:
        """An operation is about to run: whether it is verified, by its fingerprint."""
        self.fingerprint, self.wanted = hash((self.fingerprint, id(func), *_form_of(args))), False
        if self.mode == "first":
            self.verify = self.fingerprint not in _fingerprints()

    def operation_ends(self) -> None:
        """The operation has run."""
        if not self.wanted:
            # operations that read a kept value are verified apart from those that read a recorded one
            self.fingerprint = ~self.fingerprint

    def node_of(self, call: Call, reads_blank: bool = False) -> Node | None:
        """The node of a call about to be made, but none of one that did not reproduce before."""
        self.wanted = True
        return None if _fingerprints().get(self.fingerprint) is False else super().node_of(call, reads_blank)

    def link(self, *recorded: Any) -> None:
        """Note what a call wrote as replayable; see `Tape.link`. The call has been verified by now."""
        if self.verify:
            self.reproduces_by[self.fingerprint] = True
        super().link(*recorded)

    def note_finding(self, name: str, reason: str) -> None:
        """The operation with that name does not reproduce; it is told once for each fingerprint."""
        super().note_finding(name, reason)
        self.reproduces_by[self.fingerprint] = False
        warning = hash((self.fingerprint, name))
        if warning not in _fingerprints():
            _fingerprints()[warning] = False
            self.news[name] = reason

    def written_unseen(self, value: Any, tensor: torch.Tensor) -> Any:
        """Hold a value that code has overwritten unseen; see `Tape.written_unseen`. Only a verified run finds
        such writes.
        """
        self.withdrawn = True
        return super().written_unseen(value, tensor)


class ScopeRecorder(Recorder):
    """Records one scope.

    Args:
        director: decides what is recorded.
        verify: ``first`` verifies what was not verified before, ``always`` everything, ``never`` nothing.
        place: a number for the scope's place in user code.
    """

    tape: ScopeTape
    why_decides = IN_SCOPE
    """the warning of a limited model whose steps run within the scope (`lowtide.run.limit.calls`)"""

    def __init__(self, director: ScopeDirector, verify: Verify, place: int) -> None:
        around = self._unpacks if verify == "first" else None
        super().__init__(director, tape=ScopeTape(verify, place), around_unpack=around)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in the block; see `Recorder.recording`. At the end it remembers what reproduced,
        unless the scope failed, and warns of what did not.
        """
        with super().recording():
            yield
        for name, reason in self.tape.news.items():
            warn(f"lowtide keeps the results of {name} in a checkpointing scope: {reason}")
        if self.tape.withdrawn:
            return
        if len(_fingerprints()) > MOST_FINGERPRINTS:
            _fingerprints().clear()
        _fingerprints().update(self.tape.reproduces_by)

    def will_evict(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` comes back for whoever saves it, as all that the scope wrote does."""
        return self.tape.core.replayable(private.storage_key(tensor)) is not None

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Verify the operation or trust it, by its fingerprint, and run it; see `Recorder.operation`."""
        if self.tape.mode == "never" or op_info(func).is_view or private.in_backward():
            return super().operation(func, args, kwargs)
        self.tape.operation_begins(func, args)
        result = super().operation(func, args, kwargs)
        self.tape.operation_ends()
        return result

    def _unpacks(self, unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Bring a saved tensor back; if its replay differs from the forward, trust nothing of this run any
        more.
        """
        try:
            return unpack()
        except ReplayError:
            for fingerprint in self.tape.reproduces_by:
                _fingerprints().pop(fingerprint, None)
            raise


def _form_of(items: tuple[Any, ...] | list[Any]) -> list[Any]:
    """Shape, type and device of each tensor, and the address of each parameter."""
    form: list[Any] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            form += (None if item.is_nested else item.shape, item.dtype, item.device)
            owner = private.base_of(item)
            if isinstance(owner, torch.nn.Parameter):
                form.append(private.storage_key(owner))
        elif isinstance(item, (list, tuple)):
            form += _form_of(item)
    return form


def checkpointing(policy: ScopePolicy = None, *, verify: Verify = "first") -> AbstractContextManager[None]:
    """Keep the inputs of the block, and recompute its other saved tensors when backward needs the first.

    The model's Python code does not run twice: recorded operations are replayed below autograd, with their
    random state, each at most once. Regions may be nested and conditional; the inner region decides about its
    own operations. If backward does not reach a region, nothing is recomputed. Without gradients the block
    does nothing.

    Args:
        policy: ``None`` or ``"full"`` recomputes all tensors, ``"keep_all"`` none (inside an outer region). A
            list of operations (``[torch.ops.aten.gelu]``, or their names) recomputes their results. A
            function decides for each operation. It takes the operation's name, or the operation, its
            arguments and its keyword arguments, and returns whether to recompute the results.
        verify: ``first`` runs every operation twice if the region runs for the first time, or with other
            operations or shapes than before. It compares the results, and checks replayed tensors by digests.
            Results that do not reproduce are kept, and a warning names the operation. ``always`` compares
            every time, ``never`` does not. Inside another scope or a limited model, its ``verify`` is used.

    Raises:
        PlanError: the policy needs a step graph, or names an operation that does not run; or a fake tensor
            mode is active outside of `lowtide.trace`.
        ReplayError: in backward, an operation did not reproduce, or its input was overwritten.

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
    """Call ``function(*args, **kwargs)``, keep its inputs, and recompute its other saved tensors.

    It has the arguments of `torch.utils.checkpoint.checkpoint`, and uses a scope (see `checkpointing`). The
    function's Python code runs once. The operations that backward needs run again, with the random state of
    the forward.

    Args:
        function: what to call.
        args, kwargs: what to call it with.
        use_reentrant: ``None`` or ``False``.
        preserve_rng_state: ``True``; random states are always those of the forward.
        context_fn: ``None``, or a policy of selective checkpointing:
            ``functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy)``.
        determinism_check: ``default`` compares bit by bit when the function runs for the first time, or with
            other shapes than before; ``none`` compares nothing.
        debug: ``False``; a warning names operations that do not reproduce in any case.
        early_stop: ``True``; operations that backward does not need are never replayed.

    Returns:
        What the function returns.

    Raises:
        PlanError: ``function`` is no function, or an option has a value that is refused; the message names
            it.
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
    director = ScopeDirector() if plain else selective(context_fn)  # pyright: ignore
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
        (not early_stop, "early_stop", "operations that backward does not need are never replayed: drop it"),
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
def _scope(director: ScopeDirector, verify: Verify, place: int) -> Iterator[None]:
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        yield
        return
    watcher = next((one for one in reversed(watchers()) if hasattr(one, "scope")), None)
    if watcher is not None:
        with watcher.scope(director):
            yield
        return
    if private.is_fake_mode_active():
        raise PlanError(
            "checkpointing() cannot record on fake tensors: trace the step with lowtide.trace(..., fake=True)"
        )
    with ScopeRecorder(director, verify, place).recording():
        yield
