"""Replace the forward of a model whose training step stays within a budget.

A call reads: a step that is not ours runs plainly; finish the last step; find the entry of this one; do what
the state machine says, which is to plan, to profile the step, or to run it under its plan.
"""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import CodeType
from typing import Any

import torch

from lowtide import accelerator, private
from lowtide.errors import TraceError
from lowtide.graph import StepGraph
from lowtide.interception import alone, interceptors, settle
from lowtide.progress import took
from lowtide.run.limit import machine
from lowtide.run.limit.around import Around, Engine, Refused
from lowtide.run.limit.cache import Cache
from lowtide.run.limit.entry import Entry, Planned
from lowtide.run.limit.key import Members, step_key
from lowtide.run.limit.machine import Action
from lowtide.run.limit.planning import PlanMaker
from lowtide.run.limit.refusal import out_of_memory
from lowtide.run.limit.step import PlannedStep, ProfiledStep
from lowtide.run.limit.unlimited import (
    IN_BACKWARD,
    SHARED,
    UNCALLED,
    UNREACHED,
    Engagement,
    governed,
    keeps_nothing,
    why_governed,
    why_unlimited,
)
from lowtide.run.messages import ABANDONED, UNMEASURED, Overruns, warn
from lowtide.run.profile.profiler import Profiler
from lowtide.run.profile.step import profile_aside
from lowtide.run.record.handles import unseen_by_checkpoint
from lowtide.run.record.native import native_recorder
from lowtide.run.record.verify import Verify
from lowtide.run.watch import StepWatch, open_peak, weakly
from lowtide.store.stores import Stores
from lowtide.trace.results import loss_to_plan_for

_TOGETHER = (
    "a forward of this limited model begins while what an earlier one saved is still needed (its backward is "
    "to come, or kept its graph): the budget holds for each of them, and together they take more than the "
    "budget. Run backward after each forward (gradients add up), or put the limit on a module that runs them "
    "both"
)


class _Local(threading.local):
    """The state of a thread.

    Attributes:
        inside: the model's own forward runs.
        step: the latest step.
    """

    def __init__(self) -> None:
        self.inside = False
        self.step: ProfiledStep | PlannedStep | None = None


class Limiter:
    """Replaces ``model.forward``: profiles the first step with each cache key, and runs later ones under its
    plan.

    Args:
        model, loss_fn, verify, stores: as of `limit_memory`.
        engine: holds the limit where `torch.compile` is around the model; ``None`` runs it eagerly.
        asked: as of `PlanMaker`: budget, policy, optimizer, progress.

    It is the instance's ``forward`` attribute, so hooks, wrappers and ``state_dict`` see the unchanged model.
    It can be copied and pickled with the model; plans are not copied, the copy makes its own.

    Attributes:
        maker: makes the plans.
        cache: the cached plans.
        around: runs the steps that `torch.compile` is around.
        measured_bytes: what the latest step that ended took, or ``None`` where that is not known.
        shared: other limited models take part in the same steps; each is planned for its own part.
        visible: a `torch.utils.checkpoint.checkpoint` around the model sees what its latest forward saved.
        removed: the limit is gone, and calls (through a wrapper that still holds this) run unchanged.
        paused: they do for a while.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        verify: Verify,
        stores: Stores | None,
        engine: Engine | None = None,
        **asked: Any,
    ) -> None:
        self.model, self.loss_fn, self.engine = model, loss_fn, engine
        self.verify: Verify = verify
        self.original = model.__dict__.get("forward")
        self.removed = False
        self._begin(stores, asked)

    def _begin(self, stores: Stores | None, asked: dict[str, Any]) -> None:
        """Begin with no plans; a copied model is not complete yet here."""
        self.stores = stores if stores is not None else Stores()
        self.own_stores = stores is None
        self.maker = PlanMaker(self.model, lambda: self.stores.groups, **asked)
        self.cache = Cache(self.maker, self.verify)
        self.warn_once = self.maker.warn_once
        self.measured_bytes: int | None = None
        self.overruns = Overruns()
        self.around = Around(self.engine, self.warn_once)
        self.local = _Local()
        self.engagement = Engagement(self.model)
        self.handle: Any = None  # the one that users hold, once somebody asks
        self.shared = self.visible = self.paused = False

    def __getstate__(self) -> dict[str, Any]:
        names, maker = ("model", "loss_fn", "verify", "engine", "original", "removed"), self.maker
        asked = {
            "budget": maker.budget,
            "policy": maker.policy,
            "progress": maker.progress,
            "reserved": maker.reserved,
        }
        return {
            "asked": asked,
            "counted": maker.optimizer is not None,
            **{name: self.__dict__[name] for name in names},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        asked, counted = state.pop("asked"), state.pop("counted")
        self.__dict__.update(state)
        self._begin(None, asked)
        if counted:
            warn(
                "the copy of a limited model does not count an optimizer: remove() its limit and call "
                "limit_memory with the copy's optimizer"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Limiter:
        twin = memo[id(self)] = Limiter.__new__(Limiter)
        state = self.__getstate__()
        twin.__setstate__(state | {n: copy.deepcopy(state[n], memo) for n in ("model", "original")})
        twin.stores = self.stores.fresh()
        return twin

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)

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
    def step(self) -> Callable[..., Any]:
        """The model's own forward; of FSDP's root the whole call, whose hooks gather the weights."""
        return partial(private.own_call, self.model) if private.is_root(self.model) else self.forward

    # ---- a call ----------------------------------------------------------------------------------

    @private.skipped_by_dynamo
    def enter(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the model's own call, hooks and all: those of FSDP's root belong to the step."""
        if self.local.inside or self.removed or self.paused or not private.is_root(self.model):
            return private.own_call(self.model, *args, **kwargs)
        return self._call(args, kwargs)

    @private.skipped_by_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.model:  # a caller has bound this to the model like a function
            args = args[1:]
        if self.local.inside or self.removed or self.paused:
            return self.forward(*args, **kwargs)
        if private.is_root(self.model):
            self.warn_once(UNCALLED)
            return self.forward(*args, **kwargs)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model from outside of it."""
        with private.out_of_dynamo() as compiling:
            if compiling is not None and self._may_compile():
                try:
                    with self._inside():
                        return self.around.run(self, compiling, args, kwargs)
                except Refused:
                    pass
            begin = time.perf_counter()
            members = self._limited(args, kwargs)
            if members is None:
                return self._plainly(args, kwargs)
            if not self._finish_last():
                return self._beside(args, kwargs)
            key = step_key(members, args, kwargs)
            entry = self.cache.find(key)
            # a compiled call restores dispatch when it returns
            action = self.cache.called(entry, hidden=compiling is not None)
            if self.shared and self.maker.budget is not None:
                self.warn_once(SHARED)
            crowded = self._is_crowded()
            if action is Action.PROFILE and (crowded or entry.hidden):
                action = self._profile_aside_first(args, kwargs, crowded)
            if action is Action.PROFILE:
                return self._profile(entry, members.device, args, kwargs)
            alone = not members.sharded and self.maker.agreement is None and not entry.hidden
            step = PlannedStep(entry, key, members.device, crowded, alone, weakly(self._step_ended))
            return self._run(step, members, args, kwargs, begin)

    def _may_compile(self) -> bool:
        """Whether this model decides about its own step, and it is no lazy one that has yet to begin."""
        if governed() or torch.compiler.is_exporting():  # pyright: ignore
            return False
        if self.around.handle is None:
            if any(map(torch.nn.parameter.is_lazy, self.model.parameters())):
                return False
            self.engagement.end()
        return True

    def _limited(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Members | None:
        """The members of the model if this step is limited, else ``None``: it runs plainly. Warns once where
        that would surprise.
        """
        if keeps_nothing():
            return None
        if governed():
            self.engagement.end()
            self.visible = True
            if reason := why_governed():
                self.warn_once(reason)
            return None
        if private.in_backward():
            self.engagement.end()
            if private.torch_checkpoint() is None:
                self.warn_once(IN_BACKWARD)
            return None
        members = Members(self.model)
        unlimited = why_unlimited(members, args, kwargs)
        if unlimited is None:
            self.engagement.end()
            self.visible = False
            return members
        if unlimited:
            self.engagement.end()  # the reason is told instead
            self.warn_once(unlimited)
        self.visible = True
        return None

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward as it is. One that a backward runs is, where a checkpoint around this model runs it
        again, to save what the first one has shown to that checkpoint.
        """
        again = private.in_backward() and not keeps_nothing() and not governed() and not self.visible
        with self._inside(), self._metered(), unseen_by_checkpoint() if again else nullcontext():
            return self.step(*args, **kwargs)

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Have main memory's meter count what FSDP gathers weights into, in later steps, too: a storage that
        is filled again asks the allocator that it first had.
        """
        seen = open_peak(torch.device("cpu")) if private.is_root(self.model) else None
        try:
            yield
        finally:
            if seen is not None:
                seen.__exit__(None, None, None)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.local.inside = True
        try:
            yield
        finally:
            self.local.inside = False

    def _finish_last(self) -> bool:
        """Finish this thread's last step, whose graph its caller may have kept.

        Returns:
            Whether it is over; one that is being profiled and whose backward is still to come is not.
        """
        settle()
        step = self.local.step
        if isinstance(step, ProfiledStep) and step.pending:
            return False
        self.local.step = None
        if isinstance(step, ProfiledStep):
            if step.has_ended:
                if step.profiler.tracer.unreleased:  # else it went with an output that no loss used
                    self.warn_once(_TOGETHER)
                self._profile_ended(step.entry, step.profiler)
            step.profiler.close()
        elif step is not None and step.pending():
            self.warn_once(_TOGETHER)
        elif step is not None:
            step.close()
        return True

    def _beside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run another forward of a step that is being profiled."""
        step = self.local.step
        assert isinstance(step, ProfiledStep)
        with unseen_by_checkpoint(), self._inside():
            result = self.step(*args, **kwargs)
        step.profiler.beside(result, partial(self.warn_once, ABANDONED))
        return result

    def _is_crowded(self) -> bool:
        """Whether other limited models take part in the step. Where one is being profiled, the profile shows
        the operations of both; whether it is one step, its end will show.
        """
        within = [one for one in interceptors() if isinstance(one, Profiler)]
        for profiler in within:
            profiler.others.append(self)
        return self.shared or bool(within)

    # ---- profiling -------------------------------------------------------------------------------

    def _profile(
        self, entry: Entry, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a step in little memory, and plan from it when its backward has ended."""
        native_recorder()  # takes half a minute once; better now than after backward
        self.maker.replicas = private.replicated_by(self.model)
        profiler = Profiler(
            self.model,
            device,
            verify=self.cache.is_to_verify(entry),
            on_end=weakly(self._profile_ended, entry),
        )
        self.local.step = ProfiledStep(profiler, entry)
        try:
            with self._inside():
                result = profiler.run(self.step, args, kwargs)
        except BaseException:
            self.local.step = None
            raise
        self._warn_unreached(profiler.watch)
        return result

    def _profile_aside_first(self, args: tuple[Any, ...], kwargs: dict[str, Any], crowded: bool) -> Action:
        """Profile a step of lowtide's own, before one of the user's that cannot be profiled."""
        try:
            with alone():
                self.prepare(args, kwargs, within_step=True)
        except TraceError:
            if not crowded:  # a teacher beside others takes no part in backward
                raise
            return Action.PROFILE
        return Action.RUN

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], within_step: bool = False) -> Planned:
        """Plan for steps with these arguments now: profile one, and restore all state afterwards.

        Args:
            args, kwargs: of the model.
            within_step: a step of the user's is about to run; warn if this takes more than the budget.

        Raises:
            BudgetError: no plan fits.
            TraceError: no loss can be found or made up.
        """
        members = Members(self.model)
        entry = self.cache.find(step_key(members, args, kwargs))
        if self.cache.called(entry) is Action.PROFILE:
            with self.engagement.paused(), self._inside():
                profiler, graph = profile_aside(
                    [self.model],
                    members.device,
                    self.step,
                    args,
                    kwargs,
                    lambda _, result: loss_to_plan_for(result, self.loss_fn),
                    verify=self.verify != "never",
                )
            self._take_in(entry, profiler, graph, users=within_step)
            self.cache.called(entry)  # the plan of a longer step may be out of date
        assert entry.planned is not None
        return entry.planned

    def _profile_ended(self, entry: Entry, profiler: Profiler) -> None:
        """The backward of a profiled step has ended: plan from it."""
        last = self.local.step
        if isinstance(last, ProfiledStep) and last.profiler is profiler:
            self.local.step = None
        if profiler.blind or profiler.others:
            if profiler.blind:
                with self.cache.lock:
                    machine.hide(entry)
            for limiter in profiler.others:
                limiter.shared = self.shared = True
            self.measured_bytes = None  # it is that of all models together
            profiler.close()
            return
        twice = "every operation ran twice" if profiler.verified else "no operation ran twice"
        took("looked at a first step", time.perf_counter() - profiler.began, twice, self.maker.progress)
        self._take_in(entry, profiler, profiler.graph(), users=True)

    def _take_in(self, entry: Entry, profiler: Profiler, graph: StepGraph, users: bool) -> None:
        """Plan from a profiled step; see `Cache.profiled`."""
        with self.cache.lock:
            taken = self.cache.profiled(entry, profiler, graph, users)
        if users and entry.planned is not None:
            self.measured_bytes = taken

    # ---- running ---------------------------------------------------------------------------------

    def _run(
        self, step: PlannedStep, members: Members, args: tuple[Any, ...], kwargs: dict[str, Any], begin: float
    ) -> Any:
        """Run a step under its plan; the call began at ``begin``."""
        planned = step.planned
        if accelerator.is_accelerator(members.device):
            out_of_memory().follow(self)
        planned.note_time()
        if planned.plan.budget_bytes is not None and step.peak_bytes is None:
            self.warn_once(UNMEASURED)
        self.local.step = step
        forward = partial(self.step, *args, **kwargs)
        with self._inside():
            result = step.run(forward, members, self.stores, self.verify, begin)
        self._warn_unreached(step)
        return result

    def _step_ended(self, step: PlannedStep) -> None:
        """A backward of a planned step has ended: what follows, by what it took."""
        self.measured_bytes = step.measured_bytes
        with self.cache.lock:
            action = machine.ended(step.entry, step)
        if text := step.overrun_text(self.overruns, action):
            warn(text, each_time=True)

    # ---- warnings --------------------------------------------------------------------------------

    def _warn_unreached(self, watch: StepWatch) -> None:
        """Warn where a training step's forward has ended and backward cannot begin at what it returned."""
        if self.model.training and not (watch.pending() or watch.began or watch.backwards):
            self.warn_once(UNREACHED)
