"""The handle of a compiled model's limit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from lowtide import budget as budgets
from lowtide.compiled.capture import FREES_AT_ONCE, refuse_cuda_graphs
from lowtide.compiled.choose_cuts import Asked
from lowtide.compiled.flow import UNCOMPILED, Flow, Surroundings
from lowtide.compiled.moving import stores
from lowtide.compiled.overruns import Overruns
from lowtide.compiled.timeline import Resident
from lowtide.errors import BudgetError, LowtideError, PlanError, shorten
from lowtide.extensions.advice.refusal import compiled_in_words
from lowtide.extensions.optimizer.counted import check_optimizer
from lowtide.extensions.optimizer.need import optimizer_need
from lowtide.extensions.scopes.marked_regions import honour_regions
from lowtide.graph import GAP_OP, StepGraph
from lowtide.meter import resident_bytes
from lowtide.meter.resident import innermost, model_device, resident_workspace_bytes, workspace_bytes
from lowtide.plan.data import Plan
from lowtide.private import (
    compile_forward,
    compile_in_place,
    compiled_call,
    counted_apart,
    has_new_buckets,
    inductor,
    is_sharded,
    recompile_limit_hits,
    replicate_by,
    room_for_backends,
    uncut_by_ddp,
)
from lowtide.run.limit.checks import no_replicas, refuse_several_devices
from lowtide.run.limit.handle import LimitHandle
from lowtide.run.messages import Once, warn
from lowtide.run.watch import StepWatch
from lowtide.trace.results import loss_of, loss_to_plan_for, tensors_returned
from lowtide.trace.untouched import untouched, without_history

T = TypeVar("T")

_HANDLE = "_lowtide_handle"
_COMPILED = "it compiled code; later steps run the compiled code"
_OTHER = (
    "it ran other graphs or sizes than the planned steps, kept a graph, or something else allocated "
    "memory during the step"
)


class Backend(NamedTuple):
    """What compiles: its name, Inductor's settings, and other arguments of `torch.compile`."""

    name: str
    options: dict[str, Any]
    how: dict[str, Any]


class CompiledHandle(LimitHandle):
    """What governs a compiled model, see `lowtide.compile` and `lowtide.handle_of`.

    Args:
        model, compiled: as below.
        asked: of plans.
        backend: compiles.
        optimizer: its state counts against the budget, too.
        blocks: those that are compiled by themselves, where the model is not.
        forward: the model's own, where that is called through this handle alone.

    Attributes:
        model: the model that was compiled.
        compiled: what is called in its place: what `torch.compile` returned, the model itself where its
            blocks are compiled, or ``None`` where its forward is called through this handle alone.
        reduced_bytes: what gradients are copied into when backward has ended, while ranks average them.
    """

    reduced_bytes = 0

    def __init__(
        self,
        model: torch.nn.Module,
        compiled: Any,
        asked: Asked,
        backend: Backend,
        optimizer: torch.optim.Optimizer | None,
        blocks: Sequence[torch.nn.Module] = (),
        forward: Callable[..., Any] | None = None,
    ) -> None:
        refuse_several_devices(model)
        if backend.name != "aot_eager":
            refuse_cuda_graphs(backend.options)
        budgets.check(asked.budget)
        honour_regions()
        self.model, self.compiled, self._asked = model, compiled, asked
        self._backend, self._optimizer = backend, None if optimizer is None else innermost(optimizer)
        self._settings = None if backend.name == "aot_eager" else {**FREES_AT_ONCE, **backend.options}
        self._blocks, self._forward = blocks, forward
        self._own, self._own_placed = model.forward, model.__dict__.get("forward")
        self._in_parts = bool(blocks)  # whether no graph is taken for a step by itself
        self._device = model_device(model)
        self._removed = self._paused = False
        self._run_plain: Callable[..., Any] | None = None
        self._watch: StepWatch | None = None
        self._measured: int | None = None
        self._overruns = Overruns()
        self._took_bytes = self._warned_bytes = 0  # by the latest step, and of that what a warning has said
        self._codes = 0  # graphs that were captured before it
        self._install()
        if compiled is not None:
            compiled.__dict__[_HANDLE] = self
            compiled.__dict__["forward"] = lambda *args, **kwargs: self.run(*args, **kwargs)
            replicate_by(compiled, no_replicas)

    def _is_removed(self) -> bool:
        return self._removed

    def _given_budget(self) -> str | int:
        return self.budget

    # ---- what is known ---------------------------------------------------------------------------

    @property
    def extensions(self) -> tuple[()]:
        """What the limit does beyond one device and recomputation: the compiled engine has no extensions."""
        return ()

    @property
    def budget(self) -> str | int:
        """As it was given."""
        return self._asked.budget

    @property
    def plans(self) -> list[Plan]:
        """A plan for each kind of step, in the order in which they were seen; none before the first step has
        ended. A graph that holds the whole step, its loss included, has its plan when it is compiled.
        """
        return [plan for flow in dict.fromkeys(self._flows.values()) for plan in flow.plans]

    @property
    def plan(self) -> Plan | None:
        """The plan whose peak is the highest, or ``None`` before the first step has ended."""
        return max(self.plans, key=lambda plan: plan.predicted_peak_bytes, default=None)

    @property
    def graph(self) -> StepGraph | None:
        """The step graph that `plan` was made for; ``None`` where the plan came from PyTorch's cache."""
        plan = self.plan
        known: dict[str, StepGraph] = {}
        for flow in self._flows.values():
            known |= flow.step_graphs
        return known.get(plan.graph) if plan is not None else None

    @property
    def plannings(self) -> int:
        """How many plans there are for this budget: made here, or found beside cached code."""
        return len(self.plans)

    @property
    def kept(self) -> dict[str, str]:
        """Operations whose results are kept because they cannot run again, with the reason."""
        operations = self.graph.operations if self.graph is not None else ()
        return {one.name: one.reason for one in operations if one.reason and one.name != GAP_OP}

    @property
    def variants(self) -> list[int]:
        """In how many ways each graph is cut, where a step has several graphs or calls one several times."""
        return self._flow.variants()

    @property
    def compiles_nothing(self) -> bool:
        """Whether a step's forward has run of which PyTorch compiled nothing, so that no budget is held."""
        return self._flow.ran_uncompiled

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes, one for all kinds of steps: of ``"60%"``, ``"min"`` or ``"auto"`` the most
        that any was planned for; ``None`` before.
        """
        return budgets.one_for_all(self.budget, (plan.budget_bytes for plan in self.plans))

    @property
    def measured_peak_bytes(self) -> int | None:
        return self._measured

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The most live bytes that is predicted for any step, with what is resident beside it."""
        return self.plan.predicted_peak_bytes if self.plan is not None else None

    @property
    def plain_peak_bytes(self) -> int | None:
        """The same with nothing computed twice: `torch.compile` by itself, each buffer freed at once."""
        return max((plan.plain_peak_bytes for plan in self.plans), default=None)

    @property
    def predicted_seconds(self) -> float | None:
        """Forecast of a step's time, from calls timed alone."""
        found = self._flow.plans
        return sum(plan.plain_seconds + plan.predicted_extra_seconds for plan in found) if found else None

    @property
    def lower_bound_seconds(self) -> float | None:
        """No schedule of the same calls within the budget adds less to a step."""
        found = self._flow.plans
        return sum(plan.bound_extra_seconds for plan in found) if found else None

    @property
    def optimizer_bytes(self) -> int:
        return self._count_resident() - resident_bytes(self.model) - workspace_bytes(self._device)

    # ---- what is asked for -----------------------------------------------------------------------

    def set_budget(self, budget: str | int) -> None:
        """Another budget: the next step compiles anew.

        Raises:
            BudgetError: the budget is malformed; at the next step, when no plan fits.
            PlanError: the limit was removed or replaced.
        """
        budgets.check(budget)
        self._check_in_force()
        self._asked = replace(self._asked, budget=budget)
        self._close()
        self._install()

    def set_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count this optimizer's state from the next step on, in place of the one counted so far: the
        optimizer may be made after the limit. What is compiled already compiles anew.

        Args:
            optimizer: of the model's parameters, or what a trainer has wrapped around it; ``None`` counts
                none.

        Raises:
            PlanError: it holds none of the model's parameters, or the limit was removed or replaced.
            BudgetError: at the next step, when no plan fits.
        """
        self._check_in_force()
        check_optimizer(self.model, optimizer)
        self._optimizer = None if optimizer is None else innermost(optimizer)
        self._install()

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Compile and plan for a step with these arguments now: one runs, and gradients, buffers and random
        states are put back.

        Raises:
            BudgetError: no plan fits.
            PlanError: the limit was removed or replaced, nothing is compiled, or the model does not return
                its loss: what lies between its graphs and the loss is part of the plan.
        """
        self._check_in_force()
        known = self.plans
        with untouched([self.model]), torch.enable_grad():
            given, named = without_history((args, kwargs))
            result = self.run(*given, **named)
            if self._flow.graphs and loss_of(result) is None:
                self._flow.stop()
                raise PlanError(
                    "prepare() cannot plan for a compiled model that does not return its loss, because "
                    "the plan counts the memory of the loss. Run a step, or compile a module that "
                    "returns the loss"
                )
            loss = loss_to_plan_for(result, None)
            del result
            loss.backward()
        if self.plan is None:
            raise PlanError(f"there is nothing to plan for: {UNCOMPILED}")
        made = [one for one in self.plans if one not in known]
        return made[-1] if made else self.plan

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model as `torch.compile` alone compiles it for the length of the block, to compare with; plans
        stay.

        Raises:
            PlanError: the limit was removed or replaced.
        """
        self._check_in_force()
        covered = self._block_calls()
        self._run_plain = self._plainly()
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._call_blocks(covered)

    def remove(self) -> None:
        """From the next step on the model runs as `torch.compile` alone compiles it."""
        self._removed = True
        self._close()
        if self.compiled is None:
            return
        run = self._plainly()
        if self._blocks and self._own_placed is None:
            self.model.__dict__.pop("forward", None)
        else:
            self.compiled.__dict__["forward"] = run
        self.compiled.__dict__.pop(_HANDLE, None)
        replicate_by(self.compiled, None)

    def _close(self) -> None:
        """Give back what lies in tiers as soon as no step under way needs it."""
        if self._asked.tiers:
            stores().close()

    # ---- compiling -------------------------------------------------------------------------------

    def _count_resident(self) -> int:
        found = resident_bytes(self.model, self._optimizer)
        if self._optimizer is not None:
            state = optimizer_need(self._optimizer).state_bytes
            found = max(found, resident_bytes(self.model) + state)
        return found + workspace_bytes(self._device)

    def _after(self) -> int:
        """The most live bytes between backward and the optimizer's step; 0 where nothing is reduced then."""
        if not self.reduced_bytes:
            return 0
        gradients = sum(one.nbytes for one in self.model.parameters() if one.requires_grad)
        return self._count_resident() - self._resident.gradients_now() + gradients + self.reduced_bytes

    def _in_words(self, error: BudgetError) -> BudgetError:
        """The planner's refusal in a user's words."""
        return compiled_in_words(
            error,
            self.model,
            self._device,
            gradient_bytes=self._resident.gradient_bytes,
            state_bytes=self.optimizer_bytes,
            after_bytes=self._after(),
            reduced_bytes=self.reduced_bytes,
        )

    def _install(self) -> None:
        """From the next step on the model compiles anew, and is planned for."""
        self._warn_once = Once()
        count = self._weakly(CompiledHandle._count_resident, 0)
        self._resident = Resident(self.model, self._optimizer, self._device, count)
        self._runs: dict[Flow, tuple[Callable[..., Any], list[Any]]] = {}  # the forward, and calls of blocks
        self._flow = self._new_flow(0)
        self._flows = {False: self._flow}

    def _weakly(self, ask: Callable[[CompiledHandle], T], gone: T) -> Callable[[], T]:
        """Asks the handle as long as there is one; holds neither it nor the model."""
        me = weakref.ref(self)
        return lambda: gone if (handle := me()) is None else ask(handle)

    def _surroundings(self) -> Surroundings:
        """Dynamo holds a flow as long as the process lives: so what the flow asks holds no handle."""
        me = weakref.ref(self)

        def in_words(error: BudgetError) -> BudgetError:
            handle = me()
            return error if handle is None else handle._in_words(error)

        return Surroundings(
            self._device,
            resident=self._weakly(CompiledHandle._count_resident, 0),
            gradients=self._weakly(lambda one: one._resident.gradients_now(), 0),
            after=self._weakly(CompiledHandle._after, 0),
            # weights that come and go are in no graph
            in_parts=self._weakly(lambda one: one._in_parts or is_sharded(one.model), False),
            in_words=in_words,
        )

    def _new_flow(self, gradients_bytes: int) -> Flow:
        """Nothing is compiled yet, for steps that begin with so many bytes of gradients.

        Compiled code is shared by what has the same backend, so each flow is one of its own.
        """
        flow = Flow(self._asked, self._settings, self._surroundings(), gradients_bytes)
        run = self._compiled_with(backend=flow.backend, **{**counted_apart(), **self._backend.how})
        self._runs[flow] = run, self._block_calls()
        return flow

    def _choose_flow(self) -> None:
        """Choose the code and plans of a step that begins, by the gradients that there are."""
        there = self._resident.gradient_bytes = self._resident.gradients_now()
        found = self._flows.get(there > 0, self._flow)
        if found is not self._flow or there > found.gradients_bytes:
            self._flow.over()  # what it has recorded is planned for
        if not found.takes(there):
            found = self._new_flow(there)
        self._flows[there > 0] = found
        if found is not self._flow:
            self._flow = found
            self._call_blocks(self._runs[found][1])

    def _block_calls(self) -> list[Any]:
        """What calls each block that is compiled by itself."""
        return [block.__dict__.get(compiled_call(block)) for block in self._blocks]

    def _call_blocks(self, calls: Sequence[Any]) -> None:
        for block, call in zip(self._blocks, calls, strict=True):
            block.__dict__[compiled_call(block)] = call

    def _plainly(self) -> Callable[..., Any]:
        """The model as `torch.compile` alone compiles it."""
        name, options, own = self._backend
        how: dict[str, Any] = {**own, "backend": name}
        if name == "inductor" and options:
            how["options"] = options
        return self._compiled_with(**how)

    def _compiled_with(self, **how: Any) -> Callable[..., Any]:
        """What runs the model compiled with these arguments of `torch.compile`."""
        if self._blocks:
            compile_in_place(self._blocks, **how)
            return self._own
        if self._forward is not None:
            return compile_forward(self._forward, **how)
        return torch.compile(self.model, **how).forward  # type: ignore[union-attr]

    # ---- a step ----------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward within the budget."""
        if self._paused and self._run_plain is not None:
            return self._run_plain(*args, **kwargs)
        if self._flow.more_than_planned and not self._in_parts:
            self._in_parts = True
            self._install()
        if torch.is_grad_enabled() and (self._watch is None or not self._watch.is_pending()):
            self._choose_flow()
        resident_workspace_bytes(self._device)  # from before this is watched
        flow, watch = self._flow, self._watch_step(args, kwargs)
        flow.begin((args, kwargs))
        hits, buckets = recompile_limit_hits(), has_new_buckets(self.model)
        try:
            with uncut_by_ddp(), room_for_backends():
                result = self._runs[flow][0](*args, **kwargs)
        except BaseException as error:
            flow.stop()
            inner = getattr(error, "inner_exception", None)
            if isinstance(error, inductor.BackendCompilerFailed) and isinstance(inner, LowtideError):
                shorten(inner)
                raise inner from None
            shorten(error)
            raise
        flow.end(result, recompile_limit_hits() > hits)
        if flow.ran_uncompiled and self.compiled is not None:
            self._warn_once(UNCOMPILED)
        if watch is not None:
            if self._device.type == "cpu" and has_new_buckets(self.model) is not buckets:
                watch.close()  # it would count what DDP allocated, and not what that took the place of
            watch.forward_ends(tensors_returned(result))
        return result

    def _warn_above(self) -> None:
        """Warn if the latest step took more than the budget, once that is known in bytes."""
        limit, took, plan = self.budget_bytes, self._took_bytes, self.plan
        warned = self._warned_bytes
        if limit is None or plan is None or took <= max(limit + budgets.slack_bytes(limit), warned):
            return
        why = _COMPILED if self._flow.codes > self._codes else _OTHER
        text = self._overruns.text(took, limit, plan.predicted_peak_bytes, why, not warned, bool(warned))
        self._warned_bytes = took
        warn(text, each_time=True)

    def _watch_step(self, args: Any, kwargs: Any) -> StepWatch | None:
        """What measures the step that begins, or goes on with another forward."""
        if not torch.is_grad_enabled():
            return None
        if self._watch is None or not self._watch.is_pending():
            if self._watch is not None:
                self._watch.close()
            resident, me = self._resident(args, kwargs), weakref.ref(self)

            def ended(watch: StepWatch) -> None:
                handle = me()
                if handle is not None and watch.peak_bytes is not None:
                    handle._measured = resident + watch.peak_bytes
                    handle._took_bytes = max(handle._took_bytes, handle._measured)
                    handle._warn_above()

            self._warn_above()
            self._warned_bytes, self._took_bytes, self._codes = 0, 0, self._flow.codes
            self._watch = StepWatch(ended, self._device)
        return self._watch
