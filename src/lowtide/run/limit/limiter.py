"""Replace the forward of a model whose training step stays within a budget.

A kind of step goes through three states. *Unknown*: its next step is profiled
(`lowtide.run.profile.profiler`). *Looked at*: the planner makes a plan when backward has ended, before
anything else runs. *Planned*: steps run under the plan, and each is measured. What follows a step
(`outcome.py`) is noted with its kind, and done before the next step.
"""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import CodeType
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.errors import TraceError
from lowtide.graph import StepGraph
from lowtide.interception import alone, interceptors, settle
from lowtide.progress import took
from lowtide.run.compiled_submodules import left_alone
from lowtide.run.limit.around import Around, Engine, Refused
from lowtide.run.limit.key import Members, StepKey, step_key
from lowtide.run.limit.kinds import Kind, Kinds
from lowtide.run.limit.out_of_memory import out_of_memory
from lowtide.run.limit.outcome import Outcome, learn, said
from lowtide.run.limit.planned import Planned
from lowtide.run.limit.planning import Planner
from lowtide.run.limit.unlimited import (
    IN_BACKWARD,
    SHARED,
    UNREACHED,
    Engagement,
    governed,
    governing,
    keeps_nothing,
    why_governed,
    why_unlimited,
)
from lowtide.run.messages import ABANDONED, UNMEASURED, Overruns, warn
from lowtide.run.move import TransferEngine
from lowtide.run.profile.profiler import Profiler, profile_aside
from lowtide.run.record.directors import PlanDirector
from lowtide.run.record.handles import unseen_by_checkpoint
from lowtide.run.record.native import native_recorder
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.verify import Verify
from lowtide.run.watch import StepWatch, weakly
from lowtide.store.stores import Stores
from lowtide.trace.eager import StepTracer
from lowtide.trace.results import loss_to_plan_for, tensors_inside
from lowtide.words import count_text


class _Local(threading.local):
    """The state of a thread.

    Attributes:
        inside: the model's own forward runs.
        look: the look at a step whose backward is still to come.
        watch: the watch of the latest step.
    """

    def __init__(self) -> None:
        self.inside = False
        self.look: tuple[Profiler, Kind] | None = None
        self.watch: StepWatch | None = None


class Limiter:
    """Replaces ``model.forward``: looks at the first step of each kind, and runs later ones under its plan.

    Args:
        model, loss_fn, verify, stores: as of `limit_memory`.
        engine: holds the limit where `torch.compile` is around the model; ``None`` runs it eagerly.
        asked: as of `Planner`: budget, policy, optimizer, progress.

    It is the instance's ``forward`` attribute, so hooks, wrappers and ``state_dict`` see the unchanged model.
    It can be copied and pickled with the model; plans are not copied, the copy makes its own.

    Attributes:
        planner: makes the plans.
        kinds: the kinds of steps so far, and what is planned for each.
        around: runs the steps that `torch.compile` is around.
        shared: other limited models take part in the same steps; each is planned for its own part.
        visible: a `torch.utils.checkpoint.checkpoint` around the model sees what its latest forward saved.
        removed: the limit is gone, and calls (through a wrapper that still holds this) run unchanged.
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
        self.planner = Planner(self.model, lambda: self.stores.groups, **asked)
        self.kinds = Kinds(self.planner, self.verify)
        self.measured_bytes: int | None = None  # of the latest step that ended
        self.overruns = Overruns()
        self.around = Around(self.engine, self.planner.tell)
        self.local = _Local()
        self.engagement = Engagement(self.model)
        self.handle: Any = None  # the one that users hold, once somebody asks
        self.shared = self.visible = False

    def __getstate__(self) -> dict[str, Any]:
        names, planner = ("model", "loss_fn", "verify", "engine", "original", "removed"), self.planner
        asked = {"budget": planner.budget, "policy": planner.policy, "progress": planner.progress}
        return {
            "asked": asked,
            "counted": planner.optimizer is not None,
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

    # ---- a step ----------------------------------------------------------------------------------

    @private.skipped_by_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.model:  # a caller has bound this to the model like a function
            args = args[1:]
        if self.local.inside or self.removed:
            return self.forward(*args, **kwargs)
        with private.out_of_dynamo() as compiling:
            if compiling is not None and self._may_compile():
                try:
                    with self._inside():
                        return self.around.run(self, compiling, args, kwargs)
                except Refused:
                    pass
            return self._call(args, kwargs, compiling is not None)

    def _may_compile(self) -> bool:
        """Whether this model decides about its own step, and it is no lazy one that has yet to begin."""
        if governed() or torch.compiler.is_exporting():  # pyright: ignore
            return False
        if self.around.handle is None:
            if any(map(torch.nn.parameter.is_lazy, self.model.parameters())):
                return False
            self.engagement.end()
        return True

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> Any:
        if keeps_nothing():
            return self._plainly(args, kwargs)
        if governed():
            self.engagement.end()
            self.visible = True
            if reason := why_governed():
                self.planner.tell(reason)
            return self._plainly(args, kwargs)
        if private.in_backward():
            return self._within_backward(args, kwargs)
        members = Members(self.model)
        unlimited = why_unlimited(members, args, kwargs)
        if unlimited is not None:
            if unlimited:
                self.engagement.end()  # the reason is told instead
                self.planner.tell(unlimited)
            self.visible = True
            return self._plainly(args, kwargs)
        begin = time.perf_counter()
        self.engagement.end()
        self.visible = False
        self._finish_previous()
        if self.local.look is not None:  # a step with several forwards before its backward
            with unseen_by_checkpoint():
                result = self._plainly(args, kwargs)
            self.local.look[0].beside(result, partial(self.planner.tell, ABANDONED))
            return result
        key = step_key(members, args, kwargs)
        kind = self.kinds.kind_for(key)
        self._tell_above(kind)  # of one whose budget was refused
        if self.shared and self.planner.budget is not None:
            self.planner.tell(SHARED)
        # other models' looks, which show the operations of both; whether it is one step, their ends will show
        within = [one for one in interceptors() if isinstance(one, StepTracer)]
        for tracer in within:
            tracer.others.append(self)
        crowded = self.shared or bool(within)
        kind.unseen_backward |= compiled  # a compiled call restores dispatch when it returns
        if kind.wants_look and (crowded or kind.unseen_backward):
            try:
                with alone():
                    self.prepare(args, kwargs, within_step=True)
            except TraceError:
                if not crowded:  # a teacher beside others takes no part in backward
                    raise
        if kind.wants_look:
            return self._look(kind, members.device, args, kwargs)
        return self._step(kind, key, members, partial(self.forward, *args, **kwargs), begin, crowded)

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._inside():
            return self.forward(*args, **kwargs)

    def _within_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward that a backward runs: again for a checkpoint around this model, or for itself."""
        self.engagement.end()
        if private.torch_checkpoint() is None:
            self.planner.tell(IN_BACKWARD)
        with nullcontext() if self.visible else unseen_by_checkpoint():
            return self._plainly(args, kwargs)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.local.inside = True
        try:
            yield
        finally:
            self.local.inside = False

    def _finish_previous(self) -> None:
        """Finish this thread's previous step, whose graph its caller may have kept."""
        settle()
        if self.local.look is not None:
            look, kind = self.local.look
            if look.ended:  # it was finished on the thread that ran backward
                self.local.look = None
            elif look.watch.backwards:
                if look.tracer.unreleased:  # else it went with an output that no loss used
                    self._tell_together()
                self._look_ended(kind, look)
            elif look.tracer.closed or look.watch.failed():
                self.local.look = None
                look.close()
        watch, self.local.watch = self.local.watch, None
        if watch is not None:
            if watch.pending():
                self._tell_together()
            else:
                watch.close()

    def _tell_together(self) -> None:
        self.planner.tell(
            "a forward of this limited model begins while what an earlier one saved is still needed (its "
            "backward is to come, or kept its graph): the budget holds for each of them, and together they "
            "take more than the budget. Run backward after each forward (gradients add up), or put the "
            "limit on a module that runs them both",
        )

    # ---- looking ---------------------------------------------------------------------------------

    def _look(self, kind: Kind, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        native_recorder()  # takes half a minute once; better now than after backward
        look = Profiler(
            self.model,
            device,
            verify=self.kinds.is_to_verify(kind),
            on_end=weakly(self._look_ended, kind),
        )
        self.local.look = (look, kind)
        try:
            with self._inside():
                result = look.run(self.forward, args, kwargs)
        except BaseException:
            self.local.look = None
            raise
        self._tell_unreached(look.watch)
        return result

    def _tell_unreached(self, watch: StepWatch) -> None:
        """Warn where a training step's forward has ended and backward cannot begin at what it returned."""
        if self.model.training and not (watch.pending() or watch.began or watch.backwards):
            self.planner.tell(UNREACHED)

    def _look_ended(self, kind: Kind, look: Profiler) -> None:
        """A look has ended: plan for its kind."""
        if self.local.look is not None and self.local.look[0] is look:
            self.local.look = None
        if look.blind or look.tracer.others:
            kind.unseen_backward |= look.blind
            for limiter in look.tracer.others:
                limiter.shared = self.shared = True
            look.close()
            return
        twice = "every operation ran twice" if look.verified else "no operation ran twice"
        took("looked at a first step", time.perf_counter() - look.began, twice, self.planner.progress)
        with self.kinds.lock:
            graph = look.graph()
            self._take_in(kind, look, graph)

    def _take_in(self, kind: Kind, look: Profiler, graph: StepGraph) -> None:
        """Take in a look at one of the user's steps, and what that took."""
        optimizer, peak = self.planner.optimizer, look.peak_bytes
        state = self.planner.optimizer_bytes if optimizer is not None and optimizer.state else 0
        taken = None if peak is None else graph.resident_bytes + state + peak
        kind.untold_bytes = max(kind.untold_bytes, taken or 0)
        self.kinds.take_in(kind, look, graph)
        if kind.planned is not None and taken is not None:
            self.measured_bytes = taken
        self._tell_above(kind)

    def _tell_above(self, kind: Kind) -> None:
        """Warn if a step that was looked at took more than the budget, once a plan says how much that is."""
        if kind.planned is None or not kind.untold_bytes:
            return
        taken, limit = kind.untold_bytes, kind.planned.plan.budget_bytes
        kind.untold_bytes = 0
        if limit is not None and taken > limit:
            which = "the first step" if len(self.kinds.known) == kind.looks == 1 else "this step"
            smallest = budgets.asks_for(self.planner.budget) == "min"
            others = ", other kinds to their own smallest" if smallest else ""
            warn(
                f"{which}, from which lowtide plans, took {budgets.format_bytes(taken)}, and the budget is "
                f"{budgets.format_bytes(limit)}; later ones of its kind keep to it{others}",
                each_time=True,
            )

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], within_step: bool = False) -> Planned:
        """Plan for steps with these arguments now: look at one, and restore all state afterwards.

        Args:
            args, kwargs: of the model.
            within_step: a step of the user's is about to run; warn if this takes more than the budget.

        Raises:
            BudgetError: no plan fits.
            TraceError: no loss can be found or made up.
        """
        members = Members(self.model)
        kind = self.kinds.kind_for(step_key(members, args, kwargs))
        if kind.wants_look:
            with self.engagement.paused(), self._inside():
                look, graph = profile_aside(
                    [self.model],
                    members.device,
                    self.forward,
                    args,
                    kwargs,
                    lambda _, result: loss_to_plan_for(result, self.loss_fn),
                    verify=self.verify != "never",
                )
            with self.kinds.lock:
                (self._take_in if within_step else self.kinds.take_in)(kind, look, graph)
        assert kind.planned is not None
        return kind.planned

    # ---- under a plan ----------------------------------------------------------------------------

    def _step(
        self,
        kind: Kind,
        key: StepKey,
        members: Members,
        forward: Callable[[], Any],
        begin: float,
        crowded: bool,
    ) -> Any:
        planned, planner = kind.planned, self.planner
        assert planned is not None
        if members.device.type == "cuda":
            out_of_memory().follow(self)
        planned.note_time()
        # ranks that share a model run alike, and a policy that the user chose is followed
        alone = planner.agreement is None and planner.policy == "optimal"
        outcome = Outcome(key, planned, planned.fits_without_plan(key), alone, crowded)
        # another backward may come when the outputs are gone: the next step closes its watch
        stays = (lambda: None) if kind.backwards > 1 else None
        watch = StepWatch(weakly(self._learn, kind, outcome), members.device, stays)
        self.local.watch = watch
        plan = planned.plan
        if plan.budget_bytes is not None and watch.peak_bytes is None:
            planner.tell(UNMEASURED)
        steady = plan.budget_bytes is None or not kind.varies
        if steady and (outcome.without_plan or plan.changes_nothing):
            with self._inside(), governing(), unseen_by_checkpoint():
                result = forward()
        else:
            result = self._recorded(kind, outcome, watch, members, forward, begin)
        planned.steps += 1
        watch.forward_ends(tensors_inside(result))
        self._tell_unreached(watch)
        return result

    def _recorded(
        self,
        kind: Kind,
        outcome: Outcome,
        watch: StepWatch,
        members: Members,
        forward: Callable[[], Any],
        begin: float,
    ) -> Any:
        """Run the forward under the plan; all since ``begin`` beside the forward itself is its overhead."""
        planned, plan = outcome.planned, outcome.planned.plan
        first, timed, several = planned.steps == 0, planned.times_next(), kind.backwards > 1
        if timed:
            planned.timed = watch
        verify = first and self.verify != "never"
        mover = TransferEngine(plan, self.stores, verify, members.device) if plan.moves else None
        program, compiled_program = planned.program(outcome.without_plan)
        outcome.director = PlanDirector(program, plan.moves, smaller=outcome.key != planned.key)
        recorder = Recorder(
            outcome.director,
            check=self.verify == "always",
            around_unpack=watch.unpacks if timed or several else None,
            mover=mover,
            program=compiled_program,
        )
        outcome.findings = recorder.findings
        if recorder.core is not None:
            watch.follow(recorder.core.replays, several)
        with ExitStack() as stack:
            stack.enter_context(self._inside())
            stack.enter_context(recorder.recording())
            stack.enter_context(left_alone(members.compiled))
            inside = time.perf_counter()
            result = forward()
            outside = time.perf_counter()
        if mover is not None and mover.notes and first:
            warn(
                f"codecs do not fit {count_text(len(mover.notes), 'value')}, kept as they are on top of the "
                f"predicted peak ({mover.notes[0]})"
            )
        watch.recording_seconds += inside - begin + time.perf_counter() - outside
        return result

    def _learn(self, kind: Kind, outcome: Outcome, watch: StepWatch) -> None:
        """A backward of a step has ended: compare what it took with the budget."""
        planned, peak = outcome.planned, watch.peak_bytes
        outcome.backwards, outcome.makes_graph = watch.backwards, watch.makes_graph
        if peak is not None and not outcome.crowded:  # else it is that of all models together
            outcome.measured_bytes = planned.graph.resident_bytes + planned.plan.slab_bytes + peak
            self.measured_bytes = outcome.measured_bytes
        if text := said(self.overruns, outcome, learn(kind, outcome)):
            warn(text, each_time=True)
