"""A call of a limited model: whether it is a limited step, and how one that is none runs.

In: what a call begins with (`Inputs`). Out: what the model returns, or `LIMITED` (`Calls.run_unlimited`). A
call that is no limited step runs as it is (`why_plain` says which, with the warning), or is compiled where
`torch.compile` is around it (`Limiter.run_compiled`). Calls of limited models within another one are none
(`deciding`). `Engagement` waits for the first limited step, and warns where it never comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Protocol

import torch

from lowtide import private
from lowtide.interception import interceptors
from lowtide.private import Compiling
from lowtide.run.limit.key import Inputs
from lowtide.run.messages import warn
from lowtide.run.record.handles import unseen_by_checkpoint
from lowtide.run.watch import meter_gathered
from lowtide.trace.results import tensors_inside

_IN_BACKWARD = (
    "the forward of this limited model runs within a backward (torch.utils.checkpoint around it, an "
    "invertible block, an adjoint method): such a forward runs without the limit. Remove the "
    "checkpoint, because lowtide decides what is recomputed, or put the limit on a module around it"
)

_TRANSFORMED = (
    "this limited model runs inside a function transform (torch.func.vmap, grad, jvp or the like, "
    "torch.cond): such steps run without the limit. Put the limit on a module whose forward calls the "
    "transform, or use torch.autograd.grad"
)
_LAZY = (
    "some parameters of this limited model are not initialized yet (lazy modules): this step runs "
    "without the limit, and later steps run within the budget. To limit the first step, too, run the "
    "model once under torch.no_grad() before it"
)
_UNTRAINED = (
    "no parameter of this limited model requires grad, so its steps are not planned: the tensors "
    "that autograd saves for the gradients of its inputs are not limited. Put the limit on an outer "
    "module that has trainable parameters"
)

LIMITED = object()
"""In place of a result: the call is a limited step, and has not run."""


class Limiting(Protocol):
    """What running a call asks of the limiter: the model, its own step, a block within which calls of the
    model run unchanged, and the compiled engine where `torch.compile` is around the model.
    """

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def own_step(self) -> Callable[..., Any]: ...

    @property
    def compiled_handle(self) -> Any: ...

    def inside(self) -> AbstractContextManager[None]: ...
    def run_compiled(self, compiling: Compiling, inputs: Inputs) -> tuple[bool, Any]: ...


class Calls:
    """Tells which calls of a limited model are limited steps, and runs the others.

    Args:
        engagement, warn_once: the limiter's.
    """

    def __init__(self, engagement: Engagement, warn_once: Callable[[str], None]) -> None:
        self._engagement, self._warn_once = engagement, warn_once
        self._visible = False  # a checkpoint around the model sees what its latest forward saved

    def run_unlimited(self, limiter: Limiting, inputs: Inputs, compiling: Compiling | None) -> Any:
        """Run a call if it is no limited step.

        Args:
            limiter: of the model.
            inputs: of the call.
            compiling: what compiles the call, where `torch.compile` is around it.

        Returns:
            What the model returns; `LIMITED` for a limited step, which has not run.
        """
        if compiling is not None and self._may_compile(limiter):
            with limiter.inside():
                ran, result = limiter.run_compiled(compiling, inputs)
            if ran:
                return result
        why = why_plain(inputs)
        if why is not None:
            return self._run_plainly(limiter, inputs, why)
        self._visible = False  # a checkpoint around the model does not see what a limited step saves
        return LIMITED

    def _may_compile(self, limiter: Limiting) -> bool:
        """Whether nothing around this model decides what its step keeps, and all its parameters are
        initialized.
        """
        if another_decides() or torch.compiler.is_exporting():  # pyright: ignore
            return False
        if limiter.compiled_handle is None:
            if any(map(torch.nn.parameter.is_lazy, limiter.model.parameters())):
                return False
            self._engagement.end()
        return True

    def _run_plainly(self, limiter: Limiting, inputs: Inputs, why: PlainCall) -> Any:
        """Run the forward as it is. Where a `torch.utils.checkpoint` around this model runs it again within
        backward, that checkpoint sees what the second forward saves only if it saw what the first one saved.
        """
        if why.engages:
            self._engagement.end()
        if why.reason:
            self._warn_once(why.reason)
        hides = why.in_backward and not self._visible
        self._visible |= not (why.in_backward or why.saves_nothing)
        unseen = unseen_by_checkpoint() if hides else nullcontext()
        metered = meter_gathered(limiter.model) if private.may_shard() else nullcontext()
        with limiter.inside(), metered, unseen:
            return limiter.own_step(*inputs.args, **inputs.kwargs)


# ---- the first limited step ------------------------------------------------------------------------


class _RanHook:
    """A hook that notes that a part of the model ran. A copy notes nothing: a copied model has a limit of its
    own.
    """

    def __init__(self, name: str = "", ran: dict[str, None] | None = None) -> None:
        self.name, self.ran = name, ran if ran is not None else {}

    def __call__(self, *_: object) -> None:
        self.ran[self.name] = None

    def __reduce__(self) -> tuple[type[_RanHook], tuple[()]]:
        return _RanHook, ()


class Engagement:
    """Waits for a limited model's first forward, and warns if its parameters get gradients before, because
    its parts are called one by one, for instance.
    """

    waits = False  # for the first forward

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Wait from now on."""
        self.waits = True
        self._ran: dict[str, None] = {}
        self._with_gradients: set[int] = set()
        self._hooks = [
            part.register_forward_pre_hook(_RanHook(name, self._ran))
            for name, part in self._model.named_modules()
            if part is not self._model and not isinstance(part, torch.jit.ScriptModule)
        ]
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._has_gradient)
            for p in self._model.parameters()
            if not torch.nn.parameter.is_lazy(p) and p.is_leaf and p.requires_grad
        ]

    def end(self) -> None:
        """Wait no longer: the limit has engaged, or is gone."""
        self.waits = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not wait within the block, which is no step of the user's."""
        waited = self.waits
        self.end()
        try:
            yield
        finally:
            if waited:
                self.begin()

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        if not self._ran and id(parameter) not in self._with_gradients:
            self._with_gradients.add(id(parameter))  # a penalty on weights, before the first step, perhaps
            return
        called = [name for name in self._ran if not any(name.startswith(f"{other}.") for other in self._ran)]
        more = f" and {len(called) - 4} more" if len(called) > 4 else ""
        who = f"{', '.join(called[:4])}{more} did" if called else "a method of its own did, perhaps"
        self.end()
        warn(
            f"the limit on this {type(self._model).__name__} has not engaged: its parameters got gradients, "
            f"but its own forward never ran ({who}). Put the limit on what is called, or call the model "
            "itself"
        )


# ---- calls that run as they are -------------------------------------------------------------------


@dataclass(frozen=True)
class PlainCall:
    """A call of a limited model that runs as it is.

    Attributes:
        reason: the warning, which is given once; empty where nobody would be surprised.
        engages: whether `Engagement` stops waiting: the limit is of use, or ``reason`` says why it is not.
        in_backward: a backward runs the forward again.
        saves_nothing: autograd saves nothing, or the model is being exported.
    """

    reason: str = ""
    engages: bool = True
    in_backward: bool = False
    saves_nothing: bool = False


def why_plain(inputs: Inputs) -> PlainCall | None:
    """Why a call is no limited step; ``None`` for one that is."""
    if saves_nothing():
        return PlainCall(engages=False, saves_nothing=True)
    if another_decides():
        return PlainCall(why_another_decides())
    if private.in_backward():
        return PlainCall("" if private.torch_checkpoint() is not None else _IN_BACKWARD, in_backward=True)
    if private.is_transformed():
        return PlainCall(_TRANSFORMED)
    if inputs.members.lazy:
        return PlainCall(_LAZY)
    if any(map(attrgetter("requires_grad"), inputs.members.parameters)):
        return None
    trains = any(tensor.requires_grad for tensor in tensors_inside((inputs.args, inputs.kwargs)))
    return PlainCall(_UNTRAINED) if trains else PlainCall(engages=False)


def saves_nothing() -> bool:
    """Whether autograd saves nothing here, or the model is being exported (`torch.export`,
    `torch.jit.trace`).
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return True
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # pyright: ignore


# ---- limited models within others, and within scopes ----------------------------------------------


class _Deciding(threading.local):
    """How many limited models run on this thread as they are, since their plans change nothing."""

    depth = 0


_of_thread = cache(_Deciding)


@contextmanager
def deciding() -> Iterator[None]:
    """Within the block a limited model runs unrecorded, as its plan changes nothing. Limited models inside it
    run unrecorded, too: its plan is theirs.
    """
    here = _of_thread()
    here.depth += 1
    try:
        yield
    finally:
        here.depth -= 1


def another_decides() -> bool:
    """Whether a limited model around this one, or a scope, decides what is kept."""
    return _of_thread().depth > 0 or any(map(attrgetter("decides"), interceptors()))


def why_another_decides() -> str:
    """The warning of a step for which something else decides; empty where nobody would be surprised."""
    said = [getattr(one, "why_decides", "") for one in interceptors() if one.decides]
    return said[-1] if said and all(said) and not _of_thread().depth else ""
