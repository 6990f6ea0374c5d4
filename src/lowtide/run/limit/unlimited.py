"""Calls of a limited model that are no limited steps: they run as they are, or `torch.compile` is around.

In: what a call begins with. Out: what the model returns, run as it is (`why_unlimited`, with the warning) or
by the compiled engine (`Delegate`); or `LIMITED` (`UnlimitedCalls.run`). A limit that never engages is
warned of, too (`Engagement`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowtide import private
from lowtide.errors import PlanError
from lowtide.interception import interceptors
from lowtide.private import Compiling
from lowtide.run.limit.key import Inputs
from lowtide.run.messages import warn
from lowtide.run.record.handles import unseen_by_checkpoint
from lowtide.run.scope.scope import ScopeRecorder
from lowtide.run.watch import open_peak
from lowtide.trace.results import tensors_inside

SHARED = (
    "several limited models take part in one step: each is planned for its own part, and what they take "
    "together is not held against a budget. To have one budget for all, put one limit on a module that runs "
    "them"
)
UNREACHED = (
    "the forward of this limited model returned no tensor that backward begins from (it is a generator, runs "
    "backward itself, or the loss is made of what it left elsewhere): what its steps take is not held "
    "against the budget. Return what the loss is made of"
)
UNCALLED = (
    "the forward of this limited model was called past its hooks, with which FSDP gathers its weights: such "
    "steps run as they are, without a limit. Call the model itself, and limit_memory after "
    "torch.distributed.init_process_group"
)
IN_BACKWARD = (
    "the forward of this limited model runs within a backward (torch.utils.checkpoint around it, an "
    "invertible block, an adjoint method): such a forward runs as it is, without a limit. Take the "
    "checkpoint off, lowtide decides what is recomputed, or put the limit on a module around it"
)

_TRANSFORMED = (
    "this limited model runs inside a function transform (torch.func.vmap, grad, jvp or the like, "
    "torch.cond): such steps run as they are, without a limit. Put the limit on a module whose forward "
    "holds the transform, or use torch.autograd.grad"
)
_LAZY = (
    "some parameters of this limited model are not initialized yet (lazy modules): this step runs as it "
    "is, without a limit, and later ones within the budget. To limit it, too, run the model once under "
    "torch.no_grad() before"
)
_UNTRAINED = (
    "no parameter of this limited model requires grad, so its steps are not planned: what autograd keeps "
    "for the gradients of its inputs is not limited. Put the limit on a module around it that has "
    "parameters to train"
)
_IN_SCOPE = (
    "this limited model runs inside lowtide.checkpoint or checkpointing(), which decides what is kept: its "
    "budget is not held. Take the scope off, or put the limit on a module around both"
)

_EAGERLY = (
    "torch.compile around this limited model is left out, and its steps run eagerly under the limit: {}. To "
    "compile parts of it, compile its submodules, which stay so"
)
_NOTHING = (
    "PyTorch compiled nothing of its forward (it compiles none of the recurrent layers, and nothing under "
    "TORCH_COMPILE_DISABLE; TORCH_LOGS=graph_breaks says why)"
)

LIMITED = object()
"""In place of a result: the call has not run, and is a limited step."""

Engine = Callable[[Any, Compiling], Any]
"""From a limiter, and from what compiles, to a handle with ``run``.

Raises:
    PlanError: the engine cannot hold this limit; says why.
"""


@dataclass(frozen=True)
class Unlimited:
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


def why_unlimited(inputs: Inputs) -> Unlimited | None:
    """Why a call is no limited step; ``None`` for one that is."""
    if saves_nothing():
        return Unlimited(engages=False, saves_nothing=True)
    if is_governed():
        return Unlimited(why_governed())
    if private.in_backward():
        return Unlimited("" if private.torch_checkpoint() is not None else IN_BACKWARD, in_backward=True)
    if private.is_transformed():
        return Unlimited(_TRANSFORMED)
    if inputs.members.lazy:
        return Unlimited(_LAZY)
    if any(parameter.requires_grad for parameter in inputs.members.parameters):
        return None
    trains = any(tensor.requires_grad for tensor in tensors_inside((inputs.args, inputs.kwargs)))
    return Unlimited(_UNTRAINED) if trains else Unlimited(engages=False)


class _Governing(threading.local):
    """How many limited models run on this thread as they are, since their plans change nothing."""

    depth = 0


_governing = cache(_Governing)


@contextmanager
def govern() -> Iterator[None]:
    """Within the block a limited model runs unrecorded, as its plan changes nothing. Limited models inside it
    run unrecorded, too: its plan is theirs.
    """
    here = _governing()
    here.depth += 1
    try:
        yield
    finally:
        here.depth -= 1


def is_governed() -> bool:
    """Whether a limited model around this one, or a scope, decides what is kept."""
    return _governing().depth > 0 or any(one.governs for one in interceptors())


def why_governed() -> str:
    """The warning of a step for which something else decides; empty where nobody would be surprised."""
    governing = [one for one in interceptors() if one.governs]
    scoped = governing and all(isinstance(one, ScopeRecorder) for one in governing)
    return _IN_SCOPE if scoped and not _governing().depth else ""


def saves_nothing() -> bool:
    """Whether autograd saves nothing here, or the model is being exported (`torch.export`,
    `torch.jit.trace`).
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return True
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # pyright: ignore


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

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Wait from now on."""
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
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not wait within the block, which is no step of the user's."""
        waited = bool(self._hooks)
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


# ---- steps with torch.compile around ---------------------------------------------------------------


class Delegate:
    """Gives the steps that `torch.compile` is around to the compiled engine, or says why it does not.

    A trainer compiles the model that it is given (``torch_compile=True``, accelerate's plugin), or the user
    does. Dynamo does not look into a limiter. So the limiter's call learns what compiles, and with what, and
    the model's own forward is compiled within the budget with the same.

    Args:
        engine: makes the handle; ``None`` takes no step.
        warn_once: warns of something once.

    Attributes:
        handle: the compiled engine's, once it holds the limit.
    """

    def __init__(self, engine: Engine | None, warn_once: Callable[[str], None]) -> None:
        self.engine = engine
        self.handle: Any = None
        self._warn_once = warn_once
        self._refused = engine is None

    def run(self, limiter: Any, compiling: Compiling, args: Any, kwargs: Any) -> Any:
        """The forward of a step, compiled; `LIMITED` where the step has to run eagerly."""
        if self._refused or self.engine is None:
            return LIMITED
        try:
            if self.handle is None:
                self.handle = self.engine(limiter, compiling)
            result = self.handle.run(*args, **kwargs)
        except PlanError as why:
            self._refuse(str(why))
            return LIMITED
        if self.handle.compiles_nothing:
            self._refuse(_NOTHING)
        return result

    def _refuse(self, why: str) -> None:
        self.handle, self._refused = None, True
        self._warn_once(_EAGERLY.format(why))


# ---- calls -----------------------------------------------------------------------------------------


class UnlimitedCalls:
    """Runs the calls of a limited model that are no limited steps.

    Args:
        delegate, engagement, warn_once: the limiter's.
    """

    def __init__(self, delegate: Delegate, engagement: Engagement, warn_once: Callable[[str], None]) -> None:
        self._delegate, self._engagement, self._warn_once = delegate, engagement, warn_once
        self._visible = False  # a checkpoint around the model sees what its latest forward saved

    def run(self, limiter: Any, inputs: Inputs, compiling: Compiling | None) -> Any:
        """Run a call that is no limited step.

        Args:
            limiter: of the model.
            inputs: of the call.
            compiling: what compiles the call, where `torch.compile` is around it.

        Returns:
            What the model returns; `LIMITED` of a limited step, which has not run.
        """
        if compiling is not None and self._may_compile(limiter.model):
            with limiter.inside():
                result = self._delegate.run(limiter, compiling, inputs.args, inputs.kwargs)
            if result is not LIMITED:
                return result
        why = why_unlimited(inputs)
        return LIMITED if why is None else self._run_plainly(limiter, inputs, why)

    def forget_checkpoint(self) -> None:
        """A limited step begins, and what it saves is not seen by a checkpoint around the model."""
        self._visible = False

    def _may_compile(self, model: torch.nn.Module) -> bool:
        """Whether nothing around this model decides what its step keeps, and all its parameters are
        initialized.
        """
        if is_governed() or torch.compiler.is_exporting():  # pyright: ignore
            return False
        if self._delegate.handle is None:
            if any(map(torch.nn.parameter.is_lazy, model.parameters())):
                return False
            self._engagement.end()
        return True

    def _run_plainly(self, limiter: Any, inputs: Inputs, why: Unlimited) -> Any:
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
        with limiter.inside(), meter_gathered(limiter.model), unseen:
            return limiter.own_step(*inputs.args, **inputs.kwargs)


@contextmanager
def meter_gathered(model: torch.nn.Module) -> Iterator[None]:
    """Have main memory's meter count the storages that FSDP gathers a model's weights into. The meter is
    their allocator, and a storage keeps the allocator of its first step, a step without a limit included.
    """
    seen = open_peak(torch.device("cpu")) if private.units(model) else None
    try:
        yield
    finally:
        if seen is not None:
            seen.__exit__(None, None, None)
