"""Replace the forward of a model whose training step stays within a budget.

In: a call of the model (`Limiter.__call__`). Out: what the model returns. A call that is no training step
runs plainly. Else (`Limiter.limited`) the last step is finished, the entry of this one is found, and it
runs: profiled, under its plan, or under the governor alone, as the book says (`Limiter._run_next`).
"""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType, MethodType
from typing import Any

import torch

from lowtide import accelerator, private
from lowtide import budget as budgets
from lowtide.errors import TraceError, shorten
from lowtide.extension import Extension, Face
from lowtide.graph import no_collection
from lowtide.interception import drop_idle_key, suspended
from lowtide.progress import took
from lowtide.run.forwards import Forwards
from lowtide.run.limit.book import PlanBook
from lowtide.run.limit.calls import LIMITED, Calls, Engagement
from lowtide.run.limit.checks import no_replicas
from lowtide.run.limit.entry import Entry, How, Planned
from lowtide.run.limit.key import Inputs, Members
from lowtide.run.limit.planning import PlanMaker
from lowtide.run.limit.step import PlannedStep, ProfiledStep, steps_under_way
from lowtide.run.messages import (
    ABANDONED,
    CHECKPOINTING_OFF,
    CO_LIMITED,
    UNMEASURED,
    UNREACHED,
    above_budget,
    warn,
)
from lowtide.run.profile.aside import profile_aside
from lowtide.run.record.engine import engine
from lowtide.run.record.special import Verify
from lowtide.run.transforms import unused_bytes
from lowtide.run.watch import StepWatch, weakly
from lowtide.trace.results import loss_to_plan_for

_TOGETHER = (
    "a forward of this limited model begins while tensors that an earlier forward saved are still "
    "needed (a backward is still to come or kept its graph, or several limited models take part). Both "
    "forwards are held to the budget, but each has a plan of its own, and recomputes more than one "
    "joint plan would. Run all backwards before the next forward, or put the limit on a module that "
    "runs all forwards; for a pipeline, on its schedule"
)


_OWNED = "_lowtide_limiters"
"""The attribute of a copied model that has its limiters, by the id of those that its forward shares."""

_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")
"""The flags of modules that checkpoint parts of themselves: of transformers and diffusers, and of timm."""

_DISABLE, _ENABLE = "disable_gradient_checkpointing", "enable_gradient_checkpointing"

_LEAST_SHARE = 0.25
"""Of a plain step's bytes so far, where a first step looks for the least that works."""


class _Local(threading.local):
    """What a limiter knows of a thread.

    Attributes:
        inside: the model's own forward runs on it.
        step: the latest step.
        governor: of the latest step that has one.
    """

    def __init__(self) -> None:
        self.inside = False
        self.step: ProfiledStep | PlannedStep | None = None
        self.governor: Any = None


class Limiter:
    """Replaces ``model.forward``. The book says how each step runs: profiled, under its plan, under the
    governor alone, or as it is.

    Args:
        model, loss_fn, verify: as of `limit_memory`.
        face: composes limits.
        extensions: of the limit.
        settings: budget, policy, progress and plan_seconds, as of `PlanMaker`.

    The limiter is the instance's ``forward`` attribute, so hooks, wrappers and ``state_dict`` see the
    unchanged model. It can be copied and pickled with the model; the copy makes plans of its own. Others may
    wrap it, unwrap it, and bind it to the model like a function. Pickle writes a bound function by its name:
    what it reads again is the class's own forward, without a limit.

    Attributes:
        maker: makes the plans.
        book: the plans.
        delegate: gives the steps that `torch.compile` is around to the compiled engine, once there is one.
        calls: tells which calls are limited steps, and runs the others.
        co_limited: other limited models were seen to take part in the same steps; each is planned for its own
            part.
        removed: the limit is gone, and calls (through a wrapper that still holds this) run unchanged.
        paused: calls run unchanged for a while.
        checkpointing: what turns the model's own gradient checkpointing on again, which is off under the
            limit: of each module that had it on, its name in the model, and a flag or a method.
        called: whether any call has come here.
        forwards: those of a pipeline's step, which has several and runs their backwards itself; ``None``
            where a step is one forward, and its caller runs backward.
    """

    __slots__ = (  # no `__dict__`: `functools.update_wrapper` copies it to what wraps the limiter
        "__weakref__", "_abandoned", "_measured_bytes", "_profile_ended", "_step_ended", "book",
        "called", "calls", "checkpointing", "co_limited", "delegate", "engagement", "face", "handle", "local",
        "loss_fn", "maker", "model", "original", "paused", "removed", "verify", "warn_once",
    )  # fmt: skip
    _planned_step: Callable[..., PlannedStep] = PlannedStep
    __name__ = "forward"
    forwards: Forwards | None = None
    compiles = True  # `torch.compile` around the model is taken to the compiled engine

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        verify: Verify,
        face: Face,
        extensions: Iterable[Extension] = (),
        **settings: Any,
    ) -> None:
        self.model, self.loss_fn, self.face = model, loss_fn, face
        self.verify: Verify = verify
        self.original = model.__dict__.get("forward")
        self.removed = False
        self.checkpointing: tuple[tuple[str, str], ...] = ()
        self._begin(settings | {"extensions": extensions})

    def _begin(self, settings: dict[str, Any]) -> None:
        """Make what a copy does not share; a copied model is not complete yet here."""
        self.maker = PlanMaker(self.model, face=self.face, **settings)
        self.book = PlanBook(self.maker, self.verify)
        self.warn_once = self.maker.warn_once
        self._measured_bytes: int | None = None
        self.delegate: Any = None
        self.local = _Local()
        # autograd's graph holds them, and they must not hold the model
        self._step_ended, self._profile_ended = weakly(self._on_step_end), weakly(self._on_profile_end)
        self.engagement = Engagement(self.model)
        self.calls = Calls(self.engagement, self.warn_once)
        self.handle: Any = None  # the one that users hold, once somebody asks
        self.co_limited = self.paused = self.called = False
        self._abandoned = False  # whether a profiled step was

    def __getstate__(self) -> dict[str, Any]:
        maker = self.maker
        names = ("model", "loss_fn", "verify", "face", "original", "removed", "checkpointing")
        copies = [copied for extension in maker.extensions if (copied := extension.copied()) is not None]
        settings = {name: getattr(maker, name) for name in ("budget", "policy", "progress", "plan_seconds")}
        return {
            "settings": settings | {"extensions": copies},
            "not_copied": [one.not_copied for one in maker.extensions if one.not_copied],
            **{name: getattr(self, name) for name in names},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings, not_copied = state.pop("settings"), state.pop("not_copied")
        for name, value in state.items():
            setattr(self, name, value)
        self._begin(settings)
        for text in not_copied:
            warn(text)

    def __deepcopy__(self, memo: dict[int, Any]) -> Limiter:
        twin = memo[id(self)] = Limiter.__new__(Limiter)
        state = self.__getstate__()
        twin.__setstate__(state | {n: copy.deepcopy(state[n], memo) for n in ("model", "original")})
        return twin

    @property
    def measured_bytes(self) -> int | None:
        """What the latest step that ended took, or ``None`` where that is not known."""
        step = self.local.step
        if isinstance(step, ProfiledStep) and step.has_ended:  # it is handed on when the next one begins
            return step.measured_bytes
        return self._measured_bytes

    @property
    def extensions(self) -> tuple[Extension, ...]:
        """What the limit does beyond one device and recomputation."""
        return self.maker.extensions

    def extend(self, budget: str | int | None) -> None:
        """Hold the extensions that the limit needs by now, for this budget.

        Raises:
            PlanError: the budget does not go with one.
        """
        if missing := self.face.missing(self, budget):
            self.maker.extend(*missing)
        for extension in self.maker.extensions:
            extension.given(budget)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)

    @property
    def __func__(self) -> Limiter:
        """What to bind to the model in place of this: wrappers ask a method for its function."""
        return self

    @property
    def __wrapped__(self) -> Any:
        """What the wrapper that this limit is around has wrapped."""
        return _Below(self, getattr(self.original, "__wrapped__"))  # noqa: B009

    @property
    def __code__(self) -> CodeType:
        """The code of the model's own forward; `torch.export` asks for its place."""
        return inspect.unwrap(self.forward).__code__

    @property
    def __globals__(self) -> dict[str, Any]:
        raise AttributeError(
            "torch.jit.script cannot compile a model whose memory is limited: take the limit off first, "
            "lowtide.handle_of(model).remove(), or use torch.export or torch.jit.trace"
        )

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's own forward."""
        return self.original if self.original is not None else type(self.model).forward.__get__(self.model)

    @property
    def own_step(self) -> Callable[..., Any]:
        """What runs in a step: the model's own forward."""
        return self.forward

    def install(self) -> None:
        """Take the place of the model's forward."""
        self.model.__dict__["forward"] = self
        private.replicate_by(self.model, no_replicas)

    def uninstall(self) -> None:
        """Give the model its own forward back."""
        private.replicate_by(self.model, None)
        if self.model.__dict__.get("forward") is self:
            if self.original is None:
                del self.model.__dict__["forward"]
            else:
                self.model.__dict__["forward"] = self.original

    def turn_off_checkpointing(self) -> None:
        """Turn the model's own gradient checkpointing off: by the flags of its modules, and by a module's
        method where it still says that it checkpoints (with the names of diffusers, and a flag of its own).
        A step that is written down, and the first one under a plan (an earlier process may have made it), do
        so once more, since a trainer may turn it on under the limit.
        """
        on = dict.fromkeys(self.checkpointing)
        for name, module in self.model.named_modules():
            for flag in _CHECKPOINTING:
                if getattr(module, flag, None) is True:
                    setattr(module, flag, False)
                    on[name, flag] = None
        for name, module in self.model.named_modules():
            has_both = hasattr(module, _DISABLE) and hasattr(module, _ENABLE)
            if has_both and getattr(module, "is_gradient_checkpointing", None) is True:
                getattr(module, _DISABLE)()
                on[name, _ENABLE] = None
        if on:
            self.warn_once(CHECKPOINTING_OFF)
        self.checkpointing = tuple(on)

    def turn_on_checkpointing(self) -> None:
        """Turn it on again in the modules that are still there."""
        modules = dict(self.model.named_modules())
        for name, switch in self.checkpointing:
            if name in modules:
                if switch in _CHECKPOINTING:
                    setattr(modules[name], switch, True)
                else:
                    getattr(modules[name], switch)()

    # ---- a call ----------------------------------------------------------------------------------

    @private.skipped_by_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the model's forward."""
        if args and isinstance(args[0], torch.nn.Module) and self._is_bound_to(args[0]):
            return self.of(args[0])(*args[1:], **kwargs)
        self.called = True
        try:
            return self.limited(args, kwargs) if self.is_limited() else self.forward(*args, **kwargs)
        except Exception as error:
            shorten(error, self.forward)
            raise

    def _is_bound_to(self, model: torch.nn.Module) -> bool:
        """Whether ``model`` is what this is bound to like a function, and no argument of the forward."""
        if model is self.model:
            return True
        method = model.__dict__.get("forward")
        if isinstance(method, Limiter):  # around what this is bound in
            method = method.original
        return getattr(method, "__self__", None) is model and type(model) is type(self.model)

    def of(self, model: torch.nn.Module) -> Limiter:
        """The limiter of a model that this is bound to: a copy of the model shares the bound function, and
        gets a limiter of its own.
        """
        if model is self.model or not self._is_bound_to(model):
            return self
        owned: dict[int, Limiter] = model.__dict__.setdefault(_OWNED, {})
        if id(self) not in owned:
            owned[id(self)] = copy.deepcopy(self, {id(self.model): model})
        return owned[id(self)]

    @private.skipped_by_dynamo
    def limited(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call within the limit: finish the last step, find the entry of this one, and run its next step.
        What is no limited step after all runs without one (`Calls.run_unlimited`).
        """
        self.called = True
        with private.out_of_dynamo() as compiling:
            inputs = Inputs(self.model, args, kwargs, compiling is not None, self.maker.extensions)
            if (result := self.calls.run_unlimited(self, inputs, compiling)) is not LIMITED:
                return result
            last = self.local.step
            _kept = last if last is not None and last.is_kept() else None  # under way beside the next one
            del last
            if (step := self._finish_last()) is not None:
                return self._run_another(step, inputs)
            for extension in self.maker.extensions:
                extension.opens(self, inputs)
            return self._run_next(self.book.find(inputs.key), inputs)

    def is_limited(self) -> bool:
        """Whether a call of the model's forward is one within the limit."""
        return not self.is_off()

    def is_off(self) -> bool:
        """Whether calls run unchanged: those that the model makes of itself, and all without a limit."""
        return self.local.inside or self.removed or self.paused

    @property
    def compiled_handle(self) -> Any:
        """The compiled engine's handle where it holds the limit, else ``None``."""
        return None if self.delegate is None else self.delegate.handle

    def run_compiled(self, compiling: private.Compiling, inputs: Inputs) -> tuple[bool, Any]:
        """Whether the compiled engine has run a call that `torch.compile` is around, and what it returned."""
        if not self.compiles:
            return False, None
        if self.delegate is None:
            self.delegate = self.face.compiled(self)
        return self.delegate.run(compiling, inputs.args, inputs.kwargs)

    @contextmanager
    def inside(self, step: ProfiledStep | PlannedStep | None = None) -> Iterator[None]:
        """Within the block calls of the model run unchanged: the limiter itself runs its forward. Around that
        of a step, extensions do what they do there.
        """
        self.local.inside = True
        try:
            with ExitStack() as stack:
                for extension in self.maker.extensions if step is not None else ():
                    stack.enter_context(extension.around(step))
                yield
        finally:
            self.local.inside = False

    def _finish_last(self) -> ProfiledStep | PlannedStep | None:
        """Finish this thread's last step, whose graph its caller may have kept; returns it if what begins is
        another forward of it.
        """
        if self.engagement.waits:
            self.engagement.end()
        drop_idle_key()  # else Dynamo would guard on what the last backward left on this thread
        step = self.local.step
        if step is None:
            return None
        if step.takes_another():
            return step
        self.local.step = None
        if step.is_abandoned and not self._abandoned:  # where it happens again, steps are so
            self._abandoned = True
            self.warn_once(ABANDONED)
            step.discard()
            return None
        if step.is_needed():
            self.warn_once(_TOGETHER)
        step.finish()
        return None

    def _run_another(self, step: ProfiledStep | PlannedStep, inputs: Inputs) -> Any:
        """Run another forward of a step whose backward is to come."""
        self._join(steps_under_way(self.model))
        with self.inside(step):
            return step.run_another(self.own_step, inputs)

    # ---- the next step of an entry ---------------------------------------------------------------

    def _run_next(self, entry: Entry, inputs: Inputs) -> Any:
        """Run the next step of an entry, as the book says."""
        under_way = steps_under_way(self.model)
        beside_others = any(step.model() is not self.model for step in under_way)
        co_limited = self.co_limited or beside_others
        how = self.book.begin(entry, co_limited, backward_unseen=inputs.compiled)
        if co_limited:
            self._join(under_way)
        if how is How.ASIDE:
            try:
                with suspended():
                    self.prepare(inputs.args, inputs.kwargs)
                how = How.FOLLOW
            except TraceError:  # without a loss of its own, beside other models, it is held and not planned
                if not co_limited:
                    raise
                how = How.GOVERN
        if how is How.PASS and under_way:
            how = How.FOLLOW
        if how is How.LISTEN:
            step: ProfiledStep | PlannedStep = self._begin_profiled(entry, inputs)
        else:
            step = self._begin_planned(entry, how, inputs, beside_others)
        self.local.step = step
        try:
            with self.inside(step):
                result = step.run(self.own_step)
        except BaseException:
            self.local.step = None
            raise
        if self.model.training and not step.reaches_backward():
            self.warn_once(UNREACHED)
        return result

    def _join(self, steps: Iterable[ProfiledStep | PlannedStep]) -> None:
        """This model takes part in steps of other limited models: one that is profiled meanwhile sees the
        operations of this model, and one under a plan measures this model's bytes, too. When a backward of
        theirs has ended, all of these models are `co_limited`.
        """
        if self.co_limited and self.maker.budget is not None:
            self.warn_once(CO_LIMITED)
        for step in steps:
            if step.model() is not self.model:
                step.others.add(self)

    def _begin_profiled(self, entry: Entry, inputs: Inputs) -> ProfiledStep:
        """A step that is written down; a plan is made when its backward has ended."""
        self.extend(self.maker.budget)
        self.turn_off_checkpointing()
        verify, ended = self.book.is_to_verify(entry), self._profile_ended
        governor, claimed = partial(self._governor, entry, inputs), self.maker.claimed_bytes
        step = ProfiledStep(entry, inputs, verify, ended, self.forwards, governor, claimed)
        self._expect_measured(step.profiler.watch)
        return step

    def _expect_measured(self, watch: StepWatch) -> None:
        if self.maker.budget is not None and not watch.is_measured:
            self.warn_once(UNMEASURED)

    def _begin_planned(self, entry: Entry, how: How, inputs: Inputs, co_limited: bool) -> PlannedStep:
        """A step under the entry's plan, or under none."""
        if accelerator.is_accelerator(inputs.members.device):
            self.face.follow(self)
        if entry.planned is not None and not entry.planned.history.steps:
            self.turn_off_checkpointing()
        if entry.planned is not None and how is not How.GOVERN:
            for extension in self.maker.extensions:
                extension.prepare(entry.planned.plan, inputs.members.device)
        governor, ended, claimed = (
            partial(self._governor, entry, inputs),
            self._step_ended,
            self.maker.claimed_bytes,
        )
        step = self._planned_step(
            entry, how, inputs, self.verify, ended, governor, claimed, co_limited, self.maker.asked
        )
        if step.planned is not None:
            step.planned.history.read_clock(step.planned.step_graph.overhead_seconds)
        self._expect_measured(step)
        return step

    def _governor(self, entry: Entry, inputs: Inputs, live: Any, resident_bytes: int) -> Any:
        """What holds the budget of a step. ``None`` without a budget, once there is a plan; and where a share
        of 1 or more is not known in bytes yet.

        Before the budget is known in bytes, a step has a share of what a plain one would have had so far: the
        one asked for, or `_LEAST_SHARE` under "min" and without a budget. Steps that are under way on this
        thread at the same time have one governor, and the smallest of their budgets.

        Args:
            entry, inputs: of the step.
            live: where the live bytes of the step are read.
            resident_bytes: what is there when the step starts.
        """
        asked, limit = self.maker.asked, self.maker.budget_bytes
        if asked.given is None and entry.planned is not None:
            return None  # the policy alone says what goes
        if limit is None and asked.word == "auto":
            limit = budgets.resolve("auto", device=inputs.members.device, resident_bytes=resident_bytes)
        under_way = () if limit is None else steps_under_way(self.model)
        if governor := next((step.governor for step in under_way if step.governor is not None), None):
            own = [step for step in under_way if step.governor is governor and step.model() is self.model]
            is_counted = bool(own) or self.local.governor is governor
            governor.join(limit, 0 if is_counted else inputs.resident_bytes(own=True))
            self.local.governor = governor
            return governor
        share = 0.0
        if limit is None:
            share = asked.share or _LEAST_SHARE
            if share >= 1:
                return None
        elif asked.share:
            share = min(1.0, asked.share)  # a longer step raises it while it runs
        room = 0 if limit is None else limit - resident_bytes
        together = limit is not None and bool(self.maker.extensions) and self.maker.raises_together
        more = {"is_open": limit is None, "widens": not together, "resident_bytes": resident_bytes}
        self.local.governor = engine().Governor(live, room, share=share, forms=self.maker.forms, **more)
        return self.local.governor

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """Plan for steps with these arguments now: one is written down, and all state is restored afterwards.

        Args:
            args, kwargs: of the model.

        Raises:
            BudgetError: no plan fits.
            TraceError: no loss can be found or made up.
        """
        inputs = Inputs(self.model, args, kwargs, False, self.maker.extensions)
        for extension in self.maker.extensions:
            extension.opens(self, inputs)
        entry = self.book.find(inputs.key)
        if self.book.begin(entry, prepared=True) is How.ASIDE:
            self.turn_off_checkpointing()
            own, claimed = inputs.resident_bytes(), self.maker.claimed_bytes
            with self.engagement.paused(), self.inside():
                profiler, graph = profile_aside(
                    [self.model],
                    inputs.members.device,
                    self.own_step,
                    args,
                    kwargs,
                    lambda _, result: loss_to_plan_for(result, self.loss_fn),
                    verify=self.verify != "never",
                    governor=lambda live: self._governor(entry, inputs, live, own + claimed),
                )
            profiler.may_differ |= inputs.has_unkeyed_arguments
            unused = unused_bytes(self.model, graph, Members(self.model).resident_bytes())
            self.book.see_graph(entry, profiler, graph, own, unused, ())
        assert entry.planned is not None
        return entry.planned

    # ---- a backward has ended --------------------------------------------------------------------

    def _on_profile_end(self, step: ProfiledStep) -> None:
        """The backward of a step that was written down has ended: plan from it."""
        entry, profiler = step.entry, step.profiler
        if self.local.step is step:
            self.local.step = None
        if profiler.backward_unseen or step.others:
            entry.facts.backward_unseen |= profiler.backward_unseen
            self._note_others(step)
            self._measured_bytes = None
            profiler.close()
            return
        often = "each operation ran twice, until five of its runs had given equal results"
        twice = often if profiler.verified else "no operation ran twice"
        took("profiled a first step", time.perf_counter() - profiler.began, twice, self.maker.progress)
        peak = profiler.peak_bytes
        with no_collection():  # of the many small objects that describe the step, none is garbage
            graph = profiler.graph()
            unused = unused_bytes(self.model, graph, Members(self.model).resident_bytes())
            own, later = step.own_bytes, step.later_keys
            outside = max(0, graph.resident_bytes + unused - own)
            self._measured_bytes = None if peak is None else step.resident_bytes + outside + peak
            governed = None if step.governor is None else self._measured_bytes
            self.book.see_graph(entry, profiler, graph, own, unused, later, governed)
        governor = step.governor
        if governor is not None and (self.maker.asked.share or not governor.is_open):
            self._warn_above(governor)  # else it was no more than looked at

    def _on_step_end(self, step: PlannedStep) -> None:
        """A backward of a step has ended."""
        self._note_others(step)
        step.entry.kind.recorded |= step.makes_graph
        took, again = step.measured_bytes, step.told_bytes is not None
        self._measured_bytes = step.told_bytes = took
        self.book.see(step.entry, step.is_foreseen, took, step.recorder is not None, again)
        governor = step.governor
        asked = self.maker.asked
        if asked.share and step.given == asked:
            if governor is not None and governor.has_widened:
                self.maker.raise_to(governor.wished_bytes + step.resident_bytes)
            elif step.how is How.PASS and took is not None:  # a plain step
                self.maker.raise_to(int(asked.share * took))
        self._warn_above(governor, step.recorder is not None)

    def _warn_above(self, governor: Any, recorded: bool = True) -> None:
        """Say what a step took above its budget, and what for: each thing once."""
        limit, took = self.maker.budget_bytes, self._measured_bytes
        excess = governor and governor.excess
        if took is None and excess:  # of several steps together
            limit = governor.limit_bytes
            took = limit + excess[2]
        if limit is None or took is None or took <= limit or took <= limit + budgets.slack_bytes(limit):
            return
        self.warn_once(*above_budget(took, limit, excess, recorded))

    def _note_others(self, step: ProfiledStep | PlannedStep) -> None:
        """A step has ended. Where other limited models took part in it, its peak is that of all of them, and
        so is theirs.
        """
        for limiter in step.others:
            limiter.co_limited = self.co_limited = True


class _Below:
    """A function that a wrapper has wrapped, where a limit is around the wrapper. It is limited, too: bound
    to the model, it takes the wrapper off and leaves the limit on.

    Args:
        limiter: of the model.
        inner: the function.
    """

    __name__ = "forward"

    def __init__(self, limiter: Limiter, inner: Any) -> None:
        self.__func__, self._inner = limiter, inner

    @property
    def __wrapped__(self) -> Any:
        return _Below(self.__func__, self._inner.__wrapped__)

    def __call__(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        limiter = self.__func__.of(model)
        limiter.original = MethodType(self._inner, model)
        return limiter(*args, **kwargs)
