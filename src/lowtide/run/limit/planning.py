"""From a step that was looked at to a plan for it, within the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.meter import resident_bytes
from lowtide.meter.resident import gradient_of
from lowtide.plan import make
from lowtide.plan.cache import Cache, folder
from lowtide.plan.carry import CARRIED, carried, keep
from lowtide.plan.data import Plan, in_one_line
from lowtide.plan.layout.slab import without_slab
from lowtide.plan.simulate import plain
from lowtide.progress import working
from lowtide.run.hidden_costs import (
    checkpoint_bytes,
    overlapped_bytes,
    with_earlier_gradients,
    with_overhead,
)
from lowtide.run.limit.kinds import Kind
from lowtide.run.limit.optimizer_need import KnownNeed
from lowtide.run.ranks.agree import LEARNING_STEPS, Agreement, agreement_of, agreement_over
from lowtide.trace.tracer import with_collectives

Policy = str | Callable[..., Plan]


class Planner:
    """Makes the plans of one model, between steps, never while one runs.

    Args:
        model: the model.
        budget: as given to `limit_memory`.
        policy: a policy or its name.
        optimizer: counts against the budget, or ``None``.
        groups: process groups over which plans may shard, by name.
        progress: as of `limit_memory`.

    Attributes:
        kept: operations that do not reproduce, with the reason: every plan keeps their results.
        moved_bytes: of the optimizer's state that was moved to the host.
        solved: how many plans took a search. A step that fits as it is takes none, nor does one for which
            earlier decisions are near the bound.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        budget: str | int | None,
        policy: Policy,
        optimizer: torch.optim.Optimizer | None,
        groups: Callable[[], Mapping[str, Any]] = dict,
        progress: bool | None = None,
    ) -> None:
        self.model = model
        self.budget = budget
        self.policy = policy
        self.optimizer = optimizer
        self.groups = groups
        self.progress = progress
        self.kept: dict[str, str] = {}
        self.moved_bytes = 0
        self.solved = 0
        self.agreement: Agreement | None = None
        # ranks that share layers and run other programs: each plans alone
        self._neighbours: Agreement | None = None
        # whether the ranks that share the model were looked for: a copied model is not complete yet here
        self._asked = False
        self._cache = Cache(folder())
        self._need = KnownNeed()
        self._greatest_plain = 0  # the plain peak of the largest step that was planned

    def plan(self, kind: Kind, looked: StepGraph, checkpoints: int) -> None:
        """Plan for a kind of step from one of it that was looked at.

        Args:
            kind: gets the plan.
            looked: the step.
            checkpoints: how many parts of it are under ``torch.utils.checkpoint``.

        Raises:
            BudgetError: no plan fits.
        """
        if not self._asked:
            self._asked, self.agreement = True, agreement_of(self.model) or agreement_over(self.groups())
        with working("planning", "planned", self.progress) as work:
            work.say(f"planning {len(looked.operations):,} operations")
            graph = self._agreed(with_overhead(self._whole(looked)))
            unseen = overlapped_bytes(graph) + checkpoint_bytes(graph, checkpoints)
            kind.margin_bytes = max(kind.margin_bytes, unseen)
            refusal: BudgetError | None = None
            try:
                self._solve(kind, graph)
            except BudgetError as error:
                refusal = error
            # if one rank refused alone, the others would wait in a collective
            if self._neighbours is not None:
                refusal = self._neighbours.refusal(refusal)
            if refusal is not None:
                raise refusal
            assert kind.plan is not None
            work.done(in_one_line(kind.plan))

    def plan_with_gradients(self, kind: Kind, without: Kind) -> None:
        """Plan for steps that add to gradients, from a step without earlier ones.

        Raises:
            BudgetError: no plan fits.
        """
        assert without.graph is not None
        kind.looks, kind.margin_bytes = without.looks, without.margin_bytes
        kind.backwards = without.backwards
        with working("planning", "planned for steps that add to gradients", self.progress) as work:
            work.done(in_one_line(self._solve(kind, with_earlier_gradients(without.graph))))

    def solve_again(self, kind: Kind) -> None:
        """Make the plan again from all that is known by now.

        Raises:
            BudgetError: no plan fits.
        """
        assert kind.graph is not None
        with working("planning", "planned again", self.progress) as work:
            work.done(in_one_line(self._solve(kind, kind.graph)))

    def share_findings(self, kind: Kind) -> None:
        """Exchange what the latest step showed with all ranks: if one has to look or plan again, all do."""
        if self.agreement is None or kind.steps > LEARNING_STEPS:
            return
        mine = (kind.look_again, kind.replan, kind.margin_bytes, self.kept)
        for look_again, replan, margin, kept in self.agreement.share(mine):
            kind.look_again = kind.look_again or look_again
            kind.replan = kind.replan or replan
            kind.margin_bytes = max(kind.margin_bytes, margin)
            self.kept.update(kept)

    def count(self, optimizer: torch.optim.Optimizer | None) -> int:
        """Count this optimizer from now on.

        Returns:
            By how many bytes its state exceeds that of the optimizer before.
        """
        before = self.optimizer_bytes + self.moved_bytes
        self.optimizer, self.moved_bytes = optimizer, 0
        return self.optimizer_bytes - before

    # ---- one plan --------------------------------------------------------------------------------

    def _solve(self, kind: Kind, graph: StepGraph) -> Plan:
        """Give the kind a plan for this step, within the budget less the kind's margin.

        Raises:
            BudgetError: no plan fits.
        """
        graph = self._without_kept(graph)
        limit = self._limit_bytes(graph, kind.margin_bytes)
        self._balance(graph, limit, kind.margin_bytes)
        refusal = self._optimizer_refuses(limit)
        if self.agreement is not None:
            refusal = self.agreement.refusal(refusal)
        elif refusal is not None:
            refusal = self._larger(refusal, graph, limit, kind.margin_bytes)
        if refusal is not None:
            raise refusal
        moved = replace(graph, resident_bytes=graph.resident_bytes - self.moved_bytes)

        def solve(limit: int | None) -> Plan:
            return self._plan_within(moved, limit, kind.margin_bytes)

        # of this rank's own, or one for all ranks that share the model
        plan = solve(limit) if self.agreement is None else self.agreement.solve(solve, moved, limit)
        if plan.slab_bytes and limit is not None and self._optimizer_refuses(limit - plan.slab_bytes):
            plan = without_slab(plan)  # it would take its bytes during optimizer.step(), too
        self._greatest_plain = self._plain_peak(graph)
        self.solved += not (plan.changes_nothing or CARRIED in plan.notes)
        plan = replace(plan, budget_bytes=limit)
        kind.take(graph, plan)
        return plan

    def _limit_bytes(self, graph: StepGraph, margin_bytes: int) -> int | None:
        """The budget in bytes. A percentage is of the plain step, or of a larger one that was planned;
        ``"min"`` includes the margin.
        """
        if self.budget is None:
            return None
        return budgets.resolve(
            self.budget,
            self._plain_peak(graph),
            lambda: self._least(graph) + margin_bytes,
            torch.device(graph.device),
            standing_bytes=graph.resident_bytes,
        )

    def _least(self, graph: StepGraph) -> int:
        """The smallest peak that the policy can reach."""
        try:
            return make(graph, budget=1, policy=self.policy).predicted_peak_bytes
        except BudgetError as error:
            if error.smallest_bytes is None:
                raise
            return error.smallest_bytes

    def _plan_within(self, graph: StepGraph, limit: int | None, margin_bytes: int) -> Plan:
        """A plan that leaves the margin free within the limit.

        A step that needs eviction is planned for a little less, or for all of it if less does not work.

        Raises:
            BudgetError: no plan fits.
        """
        if limit is None:
            return make(graph, policy=self.policy)
        most, as_it_is = limit - margin_bytes, plain(graph).peak_bytes
        evicts = as_it_is > most
        target = max(1, most - budgets.slack_bytes(limit) if evicts else most)
        cached = evicts and self.policy == "optimal"
        plan = carried(graph, target, self._cache.of(graph), most) if cached else None
        try:
            plan = plan or make(graph, budget=target, policy=self.policy)
        except BudgetError as error:
            least = error.smallest_bytes
            if least is None:
                raise
            if least > most:
                smallest = min(as_it_is + margin_bytes, budgets.with_slack(least + margin_bytes) + 1)
                raise self._refusal(error, graph, limit, smallest) from None
            plan = make(graph, budget=least, policy=self.policy)
        if cached:
            keep(self._cache, graph, plan, most)
        return plan

    def _larger(
        self, refusal: BudgetError, graph: StepGraph, limit: int | None, margin_bytes: int
    ) -> BudgetError:
        """The optimizer's refusal, or the plan's where that needs more still: the smallest budget that is
        named has to do for both.
        """
        try:
            self._plan_within(graph, limit, margin_bytes)
        except BudgetError as error:
            if (error.smallest_bytes or 0) > (refusal.smallest_bytes or 0):
                error.add("Nor does the budget hold optimizer.step().")
                return error
        return refusal

    def _refusal(self, error: BudgetError, graph: StepGraph, limit: int, smallest: int) -> BudgetError:
        """The planner's refusal, worded with the given budget, the smallest one that works, and the
        optimizer's state as a part of its own.
        """
        resident = error.parts.pop(budgets.STANDING, 0)
        state = min(self.optimizer_bytes, resident)
        rest = {budgets.STATE: state, budgets.STANDING: resident - state}
        return budgets.too_small(
            limit,
            smallest,
            {name: count for name, count in (*rest.items(), *error.parts.items()) if count},
            policy=error.policy,
            plain_peak_bytes=self._plain_peak(graph) if str(self.budget).rstrip().endswith("%") else None,
            detail=error.detail,
        )

    def _balance(self, graph: StepGraph, limit: int | None, margin_bytes: int) -> None:
        """With ``host_fraction="auto"``, move optimizer state to the host while that takes less time than
        recomputing.
        """
        optimizer: Any = self.optimizer
        if limit is None or getattr(optimizer, "host_fraction", None) != "auto":
            return
        if self.agreement is not None:
            raise PlanError(
                'host_fraction="auto" is chosen by each rank for itself, but these ranks share one '
                "plan: give the share as a number"
            )
        everything = optimizer.device_state_bytes(0.0)

        def extra_seconds(share: float) -> float:
            moved = replace(
                graph,
                resident_bytes=graph.resident_bytes - (everything - optimizer.device_state_bytes(share)),
            )
            try:
                return self._plan_within(moved, limit, margin_bytes).predicted_extra_seconds
            except BudgetError:
                return math.inf

        share = optimizer.choose_host_fraction(extra_seconds)
        self.moved_bytes = everything - optimizer.device_state_bytes(share)

    # ---- ranks -----------------------------------------------------------------------------------

    def _agreed(self, graph: StepGraph) -> StepGraph:
        """The step, with collectives that may run again where the ranks that share the model agree on it."""
        self._neighbours = None
        if self.agreement is None:
            return graph
        if self.agreement.same_program(graph):
            return with_collectives(replace(graph, events=self.agreement.from_first(graph.events)))
        self.agreement, self._neighbours = None, self.agreement  # on every rank alike
        return graph

    # ---- what counts beside the step that was looked at ------------------------------------------

    def _plain_peak(self, graph: StepGraph) -> int:
        """The peak that percentages are of, with collectives under way: that of the largest step so far, so
        that the last one of an epoch has no smaller budget.
        """
        return max(plain(graph).peak_bytes + overlapped_bytes(graph), self._greatest_plain)

    def _without_kept(self, graph: StepGraph) -> StepGraph:
        """The graph with the operations that were found not to reproduce marked so."""
        kept = self.kept
        return graph.with_operations(
            lambda op: replace(op, replayable=False, reason=kept[op.name]) if op.name in kept else op
        )

    def _whole(self, graph: StepGraph) -> StepGraph:
        """Count all of the model and of the optimizer's state, whether the step uses it or not."""
        own = resident_bytes(self.model)
        seen = sum(s.bytes for s in graph.storages if s.kind in ("parameter", "buffer", "gradient"))
        there = {name for name, p in self.model.named_parameters() if gradient_of(p) is not None}
        # gradients that the step made
        made = sum(s.bytes for s in graph.storages if s.name in there and s.producer is not None)
        state = self.optimizer_bytes + self.moved_bytes
        return replace(graph, resident_bytes=graph.resident_bytes + max(0, own - made - seen) + state)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state on the device, which a graph's resident bytes include."""
        return self._need.of(self.optimizer).state_bytes if self.optimizer is not None else 0

    def _optimizer_refuses(self, limit: int | None) -> BudgetError | None:
        """Why the optimizer's own step cannot meet the budget, or ``None``."""
        if self.optimizer is None or limit is None:
            return None
        need = self._need.of(self.optimizer)
        resident = resident_bytes(self.model) + need.state_bytes + need.missing_gradient_bytes
        least = resident + need.step_bytes
        if least <= limit:
            return None
        parameters = sum(parameter.nbytes for parameter in self.model.parameters())
        parts = {
            budgets.PARAMETERS: parameters,
            budgets.GRADIENTS: resident - need.state_bytes - parameters,
            budgets.STATE: need.state_bytes,
            "its update": need.step_bytes,
        }
        detail = "An optimizer with fused=True takes less for its update." if need.step_bytes else ""
        return budgets.too_small(limit, least, parts, subject="optimizer.step()", detail=detail)
