"""What stands in for the forward of a model whose training step stays within a budget."""

from __future__ import annotations

import copy
import inspect
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.errors import BudgetError
from lowtide.plan.plan import Plan
from lowtide.run.aside import outputs_and_aside
from lowtide.run.compiled import left_alone
from lowtide.run.direct import PlanDirector
from lowtide.run.follow import Follower
from lowtide.run.key import StepKey, step_key
from lowtide.run.later import later_steps_told
from lowtide.run.moved import Mover, prepare
from lowtide.run.outside import OutsideGradients
from lowtide.run.planned import Planned
from lowtide.run.planning import LETS_GO, Planner, Policy
from lowtide.run.quiet import quiet
from lowtide.run.record import Recorder, Verify
from lowtide.run.refuse import refuse_sharded
from lowtide.run.rehearse import Listener
from lowtide.run.shares import slack_bytes
from lowtide.run.timed import TimedRecorder
from lowtide.run.unseen import LossMemory
from lowtide.run.watch import StepWatch, unwatched
from lowtide.store.stores import Stores
from lowtide.trace.chance import BY_CHANCE
from lowtide.trace.describe import tensors_inside
from lowtide.trace.eager import Tracer
from lowtide.trace.step import model_loss_of


class LowtideWarning(UserWarning):
    """Something that a user should know and that stops nothing: an operation that does not reproduce, a plan made again."""


class Limiter:
    """Stands in for ``model.forward``: plans at the first step of each kind, and runs every training step under its plan.

    It is the instance's ``forward`` attribute, so hooks, wrappers and ``state_dict`` see the model that they know. It can be copied and
    pickled with the model; plans are not copied, the copy plans for itself.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        budget: str | int | None,
        policy: Policy | None,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        optimizer: torch.optim.Optimizer | None,
        verify: Verify,
        stores: Stores | None = None,
    ) -> None:
        self.model = model
        self.budget = budget
        self.policy: Policy = policy if policy is not None else "optimal"
        self.loss_fn = loss_fn
        self.verify: Verify = verify
        self.original = model.__dict__.get("forward")
        self.stores = stores if stores is not None else Stores()
        self.own_stores = stores is None
        self._fresh(optimizer)

    def _fresh(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.planner = Planner(self.model, self.budget, self.policy, self.loss_fn, optimizer, lambda: self.stores.groups)
        self.plans: dict[StepKey, Planned] = {}
        self.latest: Planned | None = None
        self.lock = threading.RLock()
        self.idle = threading.Condition(self.lock)
        self.running = 0
        self.told = False
        self.told_untrained = False
        self.told_pending = False
        self.watched: weakref.ref[StepWatch] | None = None  # the latest step that was watched
        self.local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "budget", "policy", "loss_fn", "verify", "original")
        return {**{name: self.__dict__[name] for name in names}, "counted": self.planner.optimizer is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        counted = state.pop("counted")
        self.__dict__.update(state)
        self.stores = Stores()
        self.own_stores = True
        self._fresh(None)
        if counted:
            warnings.warn(
                "the copy of a limited model does not count an optimizer: remove() its limit and call limit_memory with the copy's optimizer",
                LowtideWarning,
                stacklevel=3,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Limiter:
        twin = Limiter.__new__(Limiter)
        memo[id(self)] = twin
        state = {name: copy.deepcopy(item, memo) if name in ("model", "original") else item for name, item in self.__getstate__().items()}
        twin.__setstate__(state)
        twin.stores = self.stores.fresh()
        return twin

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's own forward."""
        return self.original if self.original is not None else type(self.model).forward.__get__(self.model)

    @private.skipped_by_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.local, "inside", False):
            return self.forward(*args, **kwargs)
        with private.out_of_dynamo() as compiled:
            if compiled and not self.told:
                self.told = True
                warnings.warn(
                    "torch.compile around a limited model does not reach into it: compile its submodules, which stay compiled",
                    LowtideWarning,
                    stacklevel=2,
                )
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or _watched():
            with self._inside(), self._running():
                return self.forward(*args, **kwargs)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            self._tell_untrained(args, kwargs)
            with self._inside(), self._running():
                return self.forward(*args, **kwargs)
        begin = time.perf_counter()
        with self._inside(), self._running(args, kwargs) as planned:
            assert planned is not None
            if planned.plan.changes_nothing and not planned.loss_unknown:
                planned.steps += 1
                return self.forward(*args, **kwargs)
            return self._step(planned, args, kwargs, begin)

    @contextmanager
    def _running(self, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None) -> Iterator[Planned | None]:
        """The model runs in the block, so that no other thread lends it fake parameters meanwhile; planned for ``args`` where given."""
        with self.lock:
            planned = self.planned(args, kwargs or {}) if args is not None else None
            self.running += 1
        try:
            yield planned
        finally:
            with self.lock:
                self.running -= 1
                self.idle.notify_all()

    def _tell_untrained(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Say once that a step is not limited although autograd keeps what it needs for the inputs' gradients."""
        if not self.told_untrained and any(tensor.requires_grad for tensor in tensors_inside((args, kwargs))):
            self.told_untrained = True
            warnings.warn(
                "no parameter of this limited model requires grad, so its steps are not planned: what autograd keeps for the gradients of "
                "its inputs is not limited. Put the limit on a module around it that has parameters to train",
                LowtideWarning,
                stacklevel=6,
            )

    def _tell_pending(self) -> None:
        """Say once that several forwards stand in memory together."""
        before = self.watched() if self.watched is not None else None
        if before is not None and before.pending and not self.told_pending:
            self.told_pending = True
            warnings.warn(
                "a forward of this limited model begins while the backward of an earlier one is still to come: the budget holds for each of "
                "them, and together they take more. Run backward after each forward (gradients add up), or put the limit on a module that "
                "runs both",
                LowtideWarning,
                stacklevel=7,
            )

    def _step(self, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any], begin: float) -> Any:
        self._tell_pending()
        self.planner.note_pace(planned)
        director = PlanDirector(planned.plan)
        verifying = self.verify != "never" and not planned.verified
        plan = planned.plan
        script = planned.script if planned.script is not None and planned.script.plan is plan else None
        listener = Listener(plan) if script is None and not verifying and self.verify != "always" else None
        if plan.moves or plan.places:
            prepare(plan, self.stores, torch.device(plan.device))  # before memory is watched: what it reserves stands from now on
        watch = self._watch(planned, verifying, listener is not None)
        mover = Mover(plan, self.stores, verifying) if plan.moves else None
        kind = TimedRecorder if watch is not None and planned.timed is watch else Follower
        recorder = kind(
            director,
            verify=verifying,
            check=self.verify == "always",
            watch=watch,
            room=planned.room() if verifying else None,
            mover=mover,
            placer=self.stores.placer if plan.places else None,
            script=script,
            listener=listener,
        )
        with ExitStack() as stack:
            stack.enter_context(recorder.recording())
            stack.enter_context(left_alone(self.model))
            if script is not None:
                stack.enter_context(quiet(script, recorder))
            elif listener is not None:
                listener.stay = any(isinstance(m.__dict__.get("forward"), Limiter) for m in self.model.modules() if m is not self.model)
                stack.enter_context(listener.listening(self.model))
            inside = time.perf_counter()
            result = self.forward(*args, **kwargs)
            outside = time.perf_counter()
        if listener is not None and not director.departed:
            planned.script = listener.script()
        planned.steps += 1
        planned.departed = director.departed
        if planned.steps == 1 and planned.traced.source == "fake" and self._alone(planned) and plan.budget_bytes is not None:
            planned.astray = director.missed > 0 or recorder.findings.strange_bytes > slack_bytes(plan.budget_bytes)
        if mover is not None and mover.notes and planned.steps == 1:
            warnings.warn(
                f"{len(mover.notes)} values do not fit their codec and stay as they are, on top of the predicted peak ({mover.notes[0]})",
                LowtideWarning,
                stacklevel=5,
            )
        if watch is not None:
            there = (model_loss_of(result), *tensors_inside((args, kwargs)), *self.model.parameters(), *self.model.buffers())
            watch.recording_seconds += inside - begin + time.perf_counter() - outside
            if planned.loss_unknown and self._alone(planned):
                planned.outside = OutsideGradients(result)
            watch.awaits(tensors_inside(result))
            watch.forward_ends(*outputs_and_aside(result, there, planned.traced.aside))
        if verifying:
            planned.verified = True
            self._keep(planned, recorder.findings.kept)
        return result

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.local.inside = True
        try:
            yield
        finally:
            self.local.inside = False

    # ---- planning ---------------------------------------------------------------------------------------------------------------

    def planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """The plan for a step with these arguments, made now if there is none.

        Raises:
            BudgetError: no plan fits.
        """
        with self.lock:
            key = step_key(self.model, args, kwargs)
            found = self.plans.get(key)
            if found is None or found.astray or found.shows_outside():
                self.idle.wait_for(lambda: self.running == 0)
                found = self.plans.get(key)  # another thread may have made it meanwhile
            if found is not None and found.astray:
                found = self._traced_again(key, found, args, kwargs)
            if found is None:
                refuse_sharded(self.model)
                if self.plans:
                    last = next(reversed(self.plans))
                    warnings.warn(f"lowtide plans for another kind of step: {key.difference(last)}", LowtideWarning, stacklevel=8)
                with unwatched(), later_steps_told(self.model):
                    found = self.planner.first(self.forward, args, kwargs)
                self.plans[key] = found
            else:
                self.planner.confer(found)
                if found.shows_outside():
                    self.planner.with_outside(found, self.forward, args, kwargs)
                elif found.again:
                    self.planner.solve_again(found)
            self.latest = found
            return found

    def _traced_again(self, key: StepKey, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """The plan from a new trace; where none fits, the plan as it is.

        A first step that went astray is traced for real, under the plan as it is: on fake tensors the model takes another way. A later one
        that did, and took too much, is traced as it is now: some models make a start in their first step (ranges of activations, say) and
        go on otherwise.
        """
        planned.astray, planned.renewed, later, exceeds = False, True, planned.steps > 1, bool(planned.again)
        try:
            if exceeds and not later:  # a step for real goes by the plan as it is: let that take less first
                self.planner.solve(planned)
            with unwatched():
                planned = self.plans[key] = self.planner.first(self.forward, args, kwargs, astray=not later, under=planned.plan)
            planned.renewed = later
        except BudgetError as error:
            if exceeds:
                warnings.warn(f"lowtide traced a step again, and goes on with the plan that it has: {error}", LowtideWarning, stacklevel=9)
        return planned

    def _keep(self, planned: Planned, kept: dict[str, str]) -> None:
        """Operations were found that do not reproduce: say so once, keep what they write, and solve again."""
        new = {name: reason for name, reason in kept.items() if name not in self.planner.kept}
        if not new:
            return
        self.planner.kept.update(new)
        for name, reason in new.items():
            warnings.warn(f"lowtide keeps the results of {name}: {reason}", LowtideWarning, stacklevel=6)
        self.planner.settle(planned, "operations do not reproduce")

    def _watch(self, planned: Planned, verifying: bool, listening: bool) -> StepWatch | None:
        """What to learn from the coming step, if anything is left to learn; one that is verified or listened to takes longer than others."""
        learning = planned.loss_unknown or (not planned.held and bool(planned.traced.outputs) and planned.steps == 0)
        measuring = planned.steps <= 2 and planned.plan.budget_bytes is not None
        timing = not verifying and not listening and planned.wants_pace()
        if not (learning or measuring or timing):
            return None
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        learns, plan = learning or measuring or self.planner.learns(planned), planned.plan
        watch = StepWatch(
            lambda: self._learn(planned, watch) if learns else None,
            lambda: self._compare(planned, watch, plan, verifying) if measuring else None,
            device,
            memory=learning or measuring,
            small_bytes=slack_bytes(planned.plan.budget_bytes) // 2,
            withheld_bytes=sum(planned.traced.storages[storage].bytes for storage in planned.traced.withheld_storages()),
            repeats=planned.repeats if planned.steps == 0 else None,
        )
        planned.timed = watch if timing else planned.timed
        self.watched = weakref.ref(watch)
        return watch

    def _learn(self, planned: Planned, watch: StepWatch) -> None:
        """Backward begins: the loss has been computed, and the caller has let go of what it does not need."""
        if planned.loss_unknown:
            planned.loss_unknown = False
            planned.holding = planned.held = not watch.outputs_dropped
            if watch.loss_peak_bytes is not None and watch.loss_live_bytes is not None:
                planned.loss = LossMemory(watch.loss_peak_bytes, watch.loss_live_bytes, planned.plan.stored)
            else:
                warnings.warn(
                    "lowtide cannot measure the loss outside the model here (no C++ compiler for the counting allocator): pass loss_fn=",
                    LowtideWarning,
                    stacklevel=2,
                )
            if planned.outside is not None:
                planned.outside.reaches_model(watch.loss_live_bytes)
            self.planner.settle(planned, "the loss has been measured")
        elif planned.holding and watch.outputs_dropped:
            planned.holding = False
            planned.again = LETS_GO
        elif not planned.holding and not planned.held and not watch.outputs_dropped:
            planned.holding = planned.held = True
            self.planner.settle(planned, "the caller holds the outputs")

    def _compare(self, planned: Planned, watch: StepWatch, plan: Plan, verifying: bool) -> None:
        """Backward of a step under ``plan`` has ended: hold what the step took against the budget.

        One that was verified took more than predicted, and one that taught something, another plan is for; if they departed from their trace,
        too, that is what is to be put right.
        """
        limit = plan.budget_bytes
        if watch.peak_bytes is None or limit is None:
            return
        measured = planned.graph.resident_bytes + plan.slab_bytes + watch.peak_bytes
        departed = planned.astray or (planned.departed > 0 and planned.steps > 1 and not planned.renewed and self._alone(planned))
        if measured <= limit or not (departed or (planned.plan is plan and not planned.again and not verifying)):
            return
        warnings.warn(
            f"a planned step took {budgets.format_bytes(measured)} where {budgets.format_bytes(plan.predicted_peak_bytes)} was "
            f"predicted, above the budget of {budgets.format_bytes(limit)}: {planned.remedy(departed)}",
            LowtideWarning,
            stacklevel=2,
        )
        planned.margin_bytes += max(0, measured - (limit if verifying else plan.predicted_peak_bytes))
        planned.again = planned.again or "a step took more than predicted"
        planned.astray = departed

    def _alone(self, planned: Planned) -> bool:
        """Whether the step may be traced again: no other ranks would have to do so, too, and it is not left to chance what it does."""
        return self.planner.agreement is None and BY_CHANCE not in planned.traced.notes


def _watched() -> bool:
    """Whether a trace or another limited model around this one already governs what runs here."""
    return any(isinstance(mode, (Recorder, Tracer)) for mode in private.dispatch_modes())
