"""From a step of a model to a plan for it, and from what the step teaches to a better one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.meter import resident_bytes
from lowtide.plan import make, make_plan
from lowtide.plan.optimal import hopeless
from lowtide.plan.plan import Plan
from lowtide.plan.simulate import plain
from lowtide.plan.slab import without_slab
from lowtide.run.agree import LEARNING_STEPS, Agreement, agreement_of, agreement_over, with_collectives
from lowtide.run.claims import beside, replayed_gathers, same_forward
from lowtide.run.notice import Notice
from lowtide.run.overhead import executor_overhead
from lowtide.run.planned import Planned
from lowtide.run.resident import KnownNeed, OptimizerNeed
from lowtide.run.scope import small_executor
from lowtide.run.shares import ANSWERED_SHARES, REAL_SHARES, beyond, within
from lowtide.run.unseen import overlapped_bytes, with_loss, with_overhead
from lowtide.run.watch import unwatched
from lowtide.trace.costs import OpCost
from lowtide.trace.limited import ANSWERED, LOSS_OUTSIDE, TimingRoom, trace_model
from lowtide.trace.standin import WHOLE

Policy = str | Callable[..., Plan]
LETS_GO = "the caller lets go of the outputs before backward"
"""Why a plan is made again that fits the step all the same."""
_TIMING_SHARE = 0.85  # of what the budget leaves; the rest is for what an operation allocates on the way


class Planner:
    """Makes plans for the steps of one model.

    Args:
        model: the model.
        budget: as given to `limit_memory`.
        policy: a policy or its name.
        loss_fn: from output to loss, or ``None``.
        optimizer: counts against the budget, or ``None``.
        groups: over which plans may shard, by name.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        budget: str | int | None,
        policy: Policy,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        optimizer: torch.optim.Optimizer | None,
        groups: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.model = model
        self.budget = budget
        self.policy = policy
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.groups = groups
        self.costs: dict[Any, OpCost] = {}
        self.kept: dict[str, str] = {}
        self._need = KnownNeed()
        self._greatest_plain = 0  # the plain peak of the largest step that was planned
        self.moved_bytes = 0  # of the optimizer's state, to the host
        self._state_bytes = 0  # of the optimizer, on the device and moved, when the latest first plan was made
        self.agreement: Agreement | None = None
        self._neighbours: Agreement | None = None  # ranks that share layers and run other programs: each plans alone
        self._asked = False  # whether other ranks share the model: a copy of a model is not whole yet when this is made

    def first(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], astray: bool = False, under: Plan | None = None
    ) -> Planned:
        """The plan for a step that has not been seen yet, or has been and went ``astray`` from its trace on fake tensors, ``under`` a plan.

        Raises:
            BudgetError: no plan fits.
        """
        if not self._asked:
            self._asked, self.agreement = True, agreement_of(self.model) or agreement_over(self.groups())
        self._state_bytes = self._optimizer_need().state_bytes + self.moved_bytes if self.optimizer is not None else 0

        with Notice("lowtide") as notice:
            notice.say("tracing one step and timing its operations")
            trace = partial(self._traced, forward, args, kwargs, astray=astray, under=under)
            traced = self._agreed(trace())
            unknown = LOSS_OUTSIDE in traced.notes
            planned = Planned(traced, traced, _nothing(traced), loss_unknown=unknown, margin_bytes=overlapped_bytes(traced))
            refusal: BudgetError | None = None
            try:
                self._solve_first(planned, notice)
            except BudgetError as error:
                refusal = error
            if self._neighbours is not None:  # a rank that refuses alone would leave the others waiting in a collective
                refusal = self._neighbours.refusal(refusal)
            if refusal is not None:
                raise refusal
            self._claim(planned, lambda claims: trace(claims=claims))
            return planned

    def _traced(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        claims: frozenset[int] = frozenset(),
        astray: bool = False,
        under: Plan | None = None,
        outside: Sequence[int] | None = None,
    ) -> StepGraph:
        traced = trace_model(
            self.model,
            forward,
            args,
            kwargs,
            loss_fn=self.loss_fn,
            cost_cache=self.costs,
            small=lambda model: small_executor(model, under),
            timing_room=self._timing_room,
            claims=claims,
            astray=astray,
            hears=self.agreement is None,
            outside=outside,
        )
        return with_overhead(self._whole(traced))

    def with_outside(self, planned: Planned, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace the step again with the gradients that the loss outside was seen to hand to the outputs, and plan for that.

        Raises:
            BudgetError: no plan fits.
        """
        assert planned.outside is not None
        ways, planned.outside = planned.outside.ways(), None
        if any(way != WHOLE for way in ways):
            with unwatched(), Notice("lowtide") as notice:
                notice.say("tracing one step with what its loss was seen to do")
                real = planned.traced.source == "real"
                graph = self._traced(forward, args, kwargs, astray=real, under=planned.plan, outside=ways)
            if same_forward(graph, planned.traced):
                planned.traced, planned.again = graph, "the loss does not look at all outputs alike"
        if planned.again:
            self.solve(planned)

    def _solve_first(self, planned: Planned, notice: Notice) -> None:
        if self._least_first(planned):
            planned.graph = self._without_kept(planned.traced.holding_outputs())
            notice.say("planning for the least memory")
            planned.plan = self._make(planned.graph, lambda _: self._least(planned.graph), self.limit(planned.graph))
        else:
            notice.say(f"planning {len(planned.traced.operations):,} operations")
            self.solve(planned)

    def _least_first(self, planned: Planned) -> bool:
        """Whether the first step runs in the least memory, for a loss outside the model to be measured beside it."""
        return planned.loss_unknown and self.policy == "optimal" and self.budget is not None

    def _claim(self, planned: Planned, trace: Callable[[frozenset[int]], StepGraph]) -> None:
        """Let layers save what the plan gathers again, where the ranks that gather agree on a plan."""
        claims = replayed_gathers(planned.graph, planned.plan)
        if self.agreement is None or planned.traced.source == "real" or not claims:
            return
        graph = trace(claims)
        usable = bool(graph.claims) and graph.source == "fake" and same_forward(graph, planned.traced)
        if not all(self.agreement.share(usable)) or not self.agreement.same_program(graph):
            return
        planned.claimed = with_collectives(graph)
        if not self._least_first(planned):  # else the next plan is made when the loss is known, and chooses then
            self._prefer_claims(planned, self.limit(self._seen(planned, holding=False, moved_bytes=0)))

    def _prefer_claims(self, planned: Planned, limit: int | None) -> None:
        """Take a plan with claims where it fits and the step under it takes no longer."""
        if planned.claimed is None or planned.plan.changes_nothing:
            return
        graph = self._seen(planned, planned.holding, traced=planned.claimed)
        like = planned.plan if self.policy == "optimal" else None
        try:
            plan = self._make(graph, lambda budget: self._plan_within(planned, graph, budget, like), limit)
        except BudgetError:  # on every rank
            return
        plan = replace(beside(plan, planned.plan), budget_bytes=limit)
        if plan.predicted_extra_seconds <= planned.plan.predicted_extra_seconds:
            planned.graph, planned.plan = graph, plan

    def note_pace(self, planned: Planned) -> None:
        """Take down how long the latest step that was watched took, once that is known without waiting for the device."""
        if planned.timed is not None and not planned.timed.over():
            return
        watch, planned.timed = planned.timed, None
        seconds = watch.seconds() if watch is not None else None
        if watch is not None and seconds is not None:
            unseen = executor_overhead(watch.device.type).unseen_seconds * watch.entries
            extra = watch.replay_seconds + watch.recording_seconds + unseen
            planned.seconds.append((seconds, extra if watch.device.type == "cpu" else None))

    def learns(self, planned: Planned) -> bool:
        """Whether what the coming step shows of its caller may still change the plan; ranks that share one hear it of each other."""
        return planned.steps < LEARNING_STEPS or (self.agreement is None and not planned.settled)

    def _timing_room(self, graph: StepGraph) -> TimingRoom:
        """What the budget leaves for timing operations while only the model stands in memory.

        An operation that does not fit in it is in no plan that fits, either, so it is run all the same: the refusal has to state a budget
        that will do, and that rests on what the operation allocates.
        """
        whole = self._whole(graph)
        limit = self.limit(whole)
        if limit is None:
            return TimingRoom()
        left = max(0, int((limit - whole.resident_bytes) * _TIMING_SHARE))
        return TimingRoom(max(left, plain(whole).peak_bytes - whole.resident_bytes), left)

    def _agreed(self, traced: StepGraph) -> StepGraph:
        """The step, with collectives that may run again where the ranks that share the model agree on it."""
        self._neighbours = None
        if self.agreement is None:
            return traced
        if self.agreement.same_program(traced):
            return with_collectives(traced)
        self.agreement, self._neighbours = None, self.agreement  # on every rank alike
        return traced

    def confer(self, planned: Planned) -> None:
        """Hear what the other ranks learned from the latest step; a plan that one of them wants again, all make again."""
        if self.agreement is None or planned.steps > LEARNING_STEPS:
            return
        mine = (planned.again, planned.holding, planned.held, planned.loss, planned.loss_unknown, planned.margin_bytes, self.kept)
        for again, holding, held, loss, unknown, margin, kept in self.agreement.share(mine):
            planned.again = planned.again or again
            planned.holding |= holding
            planned.held |= held
            planned.loss_unknown &= unknown
            planned.margin_bytes = max(planned.margin_bytes, margin)
            self.kept.update(kept)
            if loss is not None and (planned.loss is None or loss.peak_bytes > planned.loss.peak_bytes):
                planned.loss = loss

    def settle(self, planned: Planned, reason: str) -> None:
        """Something was learned in the middle of a step: make the plan again now, or with the other ranks before the next step."""
        if self.agreement is None:
            try:
                self.solve(planned)
            except BudgetError as error:
                limit = self.limit(self._seen(planned, holding=False, moved_bytes=0))
                spare = planned.outside.spare_bytes() if planned.outside is not None else 0
                if not spare or limit is None or error.smallest_bytes is None or error.smallest_bytes - spare > limit:
                    raise
                planned.again = reason  # the next trace knows better
        else:
            planned.again = planned.again or reason

    def solve(self, planned: Planned) -> None:
        """Make the plan from all that is known by now.

        A caller that may hold the outputs is planned for first; where that does not fit, one that lets them go.

        Raises:
            BudgetError: no plan fits.
        """
        seen = self._seen(planned, holding=False, moved_bytes=0)
        limit = self.limit(seen)
        self._balance(planned, limit)
        refusal = self._optimizer_refuses(limit)
        if self.agreement is not None:
            refusal = self.agreement.refusal(refusal)
        if refusal is not None:
            raise refusal if self.agreement is not None else self._larger(refusal, planned, limit)
        self._solve_held(planned, limit)
        self._greatest_plain = self._plain_peak(seen)
        planned.verified = False
        planned.again = ""
        planned.timed = None
        planned.seconds.clear()

    def solve_again(self, planned: Planned) -> None:
        """As `solve`, before another step. Where all that was learned is that a step needs less, and no plan is found, the one that is there stays.

        Raises:
            BudgetError: no plan fits.
        """
        graph = planned.graph
        try:
            self.solve(planned)
        except BudgetError:
            if planned.again != LETS_GO or self.agreement is not None:
                raise
            planned.graph, planned.again = graph, ""

    def _larger(self, refusal: BudgetError, planned: Planned, limit: int | None) -> BudgetError:
        """The refusal, or that of the plan where it needs more still: the smallest budget that is named has to do."""
        try:
            self._solve_held(planned, limit)
        except BudgetError as error:
            if error.smallest_bytes is not None and error.smallest_bytes > (refusal.smallest_bytes or 0):
                return BudgetError(f"{error} Nor does the budget hold optimizer.step().", error.smallest_bytes)
        return refusal

    def _solve_held(self, planned: Planned, limit: int | None) -> None:
        """Plan for a caller that may hold the outputs, or where that does not fit, for one that lets them go."""
        if planned.holding and not planned.held:
            if not self._hopeless(planned, limit):
                with suppress(BudgetError):
                    self._solve(planned, limit)
                    return
            planned.holding = False
        self._solve(planned, limit)

    def _hopeless(self, planned: Planned, limit: int | None) -> bool:
        """Whether it is known without solving that nothing meets the budget; ranks that share a plan solve together, whatever each knows."""
        if limit is None or self.agreement is not None or self.policy != "optimal":
            return False
        return hopeless(self._seen(planned, planned.holding), limit)

    def _balance(self, planned: Planned, limit: int | None) -> None:
        """Where the optimizer leaves its share of the host open: move as much of its state as takes less time than recomputing would."""
        optimizer: Any = self.optimizer
        if limit is None or getattr(optimizer, "host_fraction", None) != "auto":
            return
        if self.agreement is not None:
            raise PlanError(
                'host_fraction="auto" is chosen by each rank for itself, but these ranks share one plan: give the share as a number'
            )
        everything = optimizer.device_state_bytes(0.0)

        def extra_seconds(share: float) -> float:
            self.moved_bytes = everything - optimizer.device_state_bytes(share)
            try:
                self._solve(planned, limit)
            except BudgetError:
                return math.inf
            return planned.plan.predicted_extra_seconds

        share = optimizer.choose_host_fraction(extra_seconds)
        self.moved_bytes = everything - optimizer.device_state_bytes(share)

    def _solve(self, planned: Planned, limit: int | None) -> None:
        """Plan for `limit` less what was seen to come on top; a trace of real tensors shows when storages end only roughly."""
        planned.graph = graph = self._seen(planned, planned.holding)
        plan = self._make(graph, lambda budget: self._plan_within(planned, graph, budget), limit)
        if plan.slab_bytes and limit is not None and self._optimizer_refuses(limit - plan.slab_bytes) is not None:
            plan = without_slab(plan)  # it would stand beside optimizer.step(), too
        planned.plan = replace(plan, budget_bytes=limit)
        self._prefer_claims(planned, limit)

    def _make(self, graph: StepGraph, solve: Callable[[int | None], Plan], limit: int | None) -> Plan:
        """A plan of this rank's own, or one for all ranks that share the model."""
        return solve(limit) if self.agreement is None else self.agreement.solve(solve, graph, limit)

    def _plan_within(self, planned: Planned, graph: StepGraph, limit: int | None, like: Plan | None = None) -> Plan:
        """A plan for the limit, less what was seen to come on top and what is left for what a trace does not show.

        Where the decisions of ``like`` fit as they are, the plan has those.
        """
        share, share_at_least = REAL_SHARES if graph.source == "real" else ANSWERED_SHARES if ANSWERED in graph.notes else (1.0, 1.0)
        target, enough = limit, plain(graph).peak_bytes + planned.margin_bytes  # for nothing to be given up
        if limit is not None:
            target = (limit if enough <= limit else within(limit, share)) - planned.margin_bytes
        if like is not None:
            with suppress(BudgetError):
                return make_plan(graph, stored=like.stored, policy=like.policy, budget=target)
        try:
            return make(graph, budget=None if target is None else max(1, target), policy=self.policy)
        except BudgetError as error:
            least = error.smallest_bytes
            if least is None or limit is None:
                raise
            if least > (within(limit, share_at_least) if share < 1 else limit) and not (planned.margin_bytes and least <= limit):
                whole = self._plain_peak(graph) if str(self.budget).rstrip().endswith("%") else None
                raise beyond(error, limit, share, enough, whole) from None
        return make(graph, budget=least, policy=self.policy)

    def _seen(self, planned: Planned, holding: bool, moved_bytes: int | None = None, traced: StepGraph | None = None) -> StepGraph:
        """The traced step with what is known of its loss, its caller, what does not reproduce, and what was moved to the host."""
        traced = planned.traced if traced is None else traced
        graph = traced.holding_outputs() if holding else traced
        graph = replace(graph, resident_bytes=graph.resident_bytes - (self.moved_bytes if moved_bytes is None else moved_bytes))
        return self._without_kept(graph if planned.loss is None else with_loss(graph, planned.loss))

    def limit(self, graph: StepGraph) -> int | None:
        """The budget in bytes; a percentage is of the plain step whose caller lets go of the outputs, or of a larger one that was planned."""
        return None if self.budget is None else budgets.parse(self.budget, self._plain_peak(graph))

    def _plain_peak(self, graph: StepGraph) -> int:
        """What percentages are of: a smaller step, as the last of an epoch, has as much memory as those before it."""
        return max(plain(graph).peak_bytes, self._greatest_plain)

    def _least(self, graph: StepGraph) -> Plan:
        try:
            return make(graph, budget=1, policy=self.policy)
        except BudgetError as error:
            if error.smallest_bytes is None:
                raise
            least = error.smallest_bytes
        return make(graph, budget=least, policy=self.policy)

    def _without_kept(self, graph: StepGraph) -> StepGraph:
        """The graph with the operations that were found not to reproduce marked so."""
        if not self.kept:
            return graph
        operations = tuple(
            replace(operation, replayable=False, reason=self.kept[operation.name]) if operation.name in self.kept else operation
            for operation in graph.operations
        )
        return replace(graph, operations=operations)

    def _whole(self, graph: StepGraph) -> StepGraph:
        """Count everything of the model's and the optimizer's, used by this step or not."""
        own = resident_bytes(self.model)
        seen = sum(s.bytes for s in graph.storages if s.kind in ("parameter", "buffer", "gradient"))
        return replace(graph, resident_bytes=graph.resident_bytes + max(0, own - seen) + self._state_bytes)

    def _optimizer_need(self) -> OptimizerNeed:
        assert self.optimizer is not None
        return self._need.of(self.optimizer)

    def _optimizer_refuses(self, limit: int | None) -> BudgetError | None:
        """Why the optimizer's own step cannot meet the budget, or ``None``."""
        if self.optimizer is None or limit is None:
            return None
        need = self._optimizer_need()
        standing = resident_bytes(self.model) + need.state_bytes + need.missing_gradient_bytes
        least = standing + need.step_bytes
        if least <= limit:
            return None
        update = f" and its update {budgets.format_bytes(need.step_bytes)} more (less with fused=True)" if need.step_bytes else ""
        return BudgetError(
            f"the budget of {budgets.format_bytes(limit)} does not hold optimizer.step(): parameters, gradients and the state of "
            f"{type(self.optimizer).__name__} take {budgets.format_bytes(standing)}{update}. "
            f"The smallest budget is {budgets.format_bytes(least)} ({least} bytes)",
            least,
        )


def _nothing(graph: StepGraph) -> Plan:
    return Plan(graph.fingerprint(), "none", None, {}, frozenset(), (), 0, 0, 0.0, 0.0)
