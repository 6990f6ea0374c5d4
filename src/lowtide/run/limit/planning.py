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
from lowtide.run.limit.hidden_costs import (
    checkpoint_bytes,
    overlapped_bytes,
    with_overhead,
    with_standing_gradients,
)
from lowtide.run.limit.kinds import Kind
from lowtide.run.limit.optimizer_need import KnownNeed, OptimizerNeed
from lowtide.run.ranks.agree import LEARNING_STEPS, Agreement, agreement_of, agreement_over
from lowtide.trace.tracer import with_collectives

Policy = str | Callable[..., Plan]


class Planner:
    """Makes plans for the steps of one model. It is called between steps, never while one runs.

    Args:
        model: the model.
        budget: as given to `limit_memory`.
        policy: a policy or its name.
        optimizer: counts against the budget, or ``None``.
        groups: over which plans may shard, by name.
        progress: as of `limit_memory`.

    Attributes:
        kept: operations that do not reproduce, with the reason: every plan keeps what they write.
        moved_bytes: of the optimizer's state, to the host.
        solved: how many plans have been searched for. Where the step fits as it is, there is nothing to
            search; where decisions that were made before lie near the bound, nothing to win.
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
        # whether other ranks share the model: a copy of a model is not whole yet when this is made
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
            # a rank that refuses alone would leave the others waiting in a collective
            if self._neighbours is not None:
                refusal = self._neighbours.refusal(refusal)
            if refusal is not None:
                raise refusal
            assert kind.plan is not None
            work.done(in_one_line(kind.plan))

    def plan_standing(self, kind: Kind, without: Kind) -> None:
        """Plan for steps before which gradients stand, from a step before which none did.

        Raises:
            BudgetError: no plan fits.
        """
        assert without.graph is not None
        kind.looks, kind.margin_bytes = without.looks, without.margin_bytes
        kind.backwards = without.backwards
        with working("planning", "planned for steps that add to gradients", self.progress) as work:
            work.done(in_one_line(self._solve(kind, with_standing_gradients(without.graph))))

    def solve_again(self, kind: Kind) -> None:
        """Make the plan again from all that is known by now.

        Raises:
            BudgetError: no plan fits.
        """
        assert kind.graph is not None
        with working("planning", "planned again", self.progress) as work:
            work.done(in_one_line(self._solve(kind, kind.graph)))

    def confer(self, kind: Kind) -> None:
        """Hear what the other ranks learned from the latest step; what one of them wants again, all do
        again.
        """
        if self.agreement is None or kind.steps > LEARNING_STEPS:
            return
        mine = (kind.look_again, kind.solve_again, kind.margin_bytes, self.kept)
        for look_again, solve_again, margin, kept in self.agreement.share(mine):
            kind.look_again = kind.look_again or look_again
            kind.solve_again = kind.solve_again or solve_again
            kind.margin_bytes = max(kind.margin_bytes, margin)
            self.kept.update(kept)

    def count(self, optimizer: torch.optim.Optimizer | None) -> int:
        """Count this optimizer from now on; by how many bytes more stands before each step."""
        before = self.optimizer_bytes + self.moved_bytes
        self.optimizer, self.moved_bytes = optimizer, 0
        return self.optimizer_bytes - before

    def note_pace(self, kind: Kind) -> None:
        """Take down how long the latest step that was timed took, once that is known without waiting for the
        device.
        """
        if kind.timed is not None and not kind.timed.over():
            return
        watch, kind.timed = kind.timed, None
        seconds = watch.seconds() if watch is not None else None
        if watch is not None and seconds is not None:
            assert kind.graph is not None
            extra = watch.replay_seconds + watch.recording_seconds + kind.graph.overhead_seconds
            kind.seconds.append((seconds, extra if watch.device.type == "cpu" else None))

    def limit(self, graph: StepGraph, margin_bytes: int) -> int | None:
        """The budget in bytes; a percentage is of the plain step, or of a larger one that was planned. The
        smallest one leaves ``margin_bytes`` for what comes on top of a plan.
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
        """The smallest peak of any plan that is known."""
        try:
            return make(graph, budget=1, policy=self.policy).predicted_peak_bytes
        except BudgetError as error:
            if error.smallest_bytes is None:
                raise
            return error.smallest_bytes

    # ---- one plan --------------------------------------------------------------------------------

    def _solve(self, kind: Kind, graph: StepGraph) -> Plan:
        graph = self._without_kept(graph)
        limit = self.limit(graph, kind.margin_bytes)
        self._balance(kind, graph, limit)
        refusal = self._optimizer_refuses(limit)
        if self.agreement is not None:
            refusal = self.agreement.refusal(refusal)
        if refusal is not None:
            raise refusal if self.agreement is not None else self._larger(refusal, kind, graph, limit)
        moved = replace(graph, resident_bytes=graph.resident_bytes - self.moved_bytes)

        def solve(budget: int | None) -> Plan:
            return self._plan_within(moved, budget, kind.margin_bytes)

        # of this rank's own, or one for all ranks that share the model
        plan = solve(limit) if self.agreement is None else self.agreement.solve(solve, moved, limit)
        if (
            plan.slab_bytes
            and limit is not None
            and self._optimizer_refuses(limit - plan.slab_bytes) is not None
        ):
            plan = without_slab(plan)  # it would stand beside optimizer.step(), too
        self._greatest_plain = self._plain_peak(graph)
        self.solved += not (plan.changes_nothing or CARRIED in plan.notes)
        plan = replace(plan, budget_bytes=limit)
        kind.takes(graph, plan)
        return plan

    def _larger(self, refusal: BudgetError, kind: Kind, graph: StepGraph, limit: int | None) -> BudgetError:
        """The optimizer's refusal, or the plan's where that needs more still: the smallest budget that is
        named has to do for both.
        """
        try:
            self._plan_within(graph, limit, kind.margin_bytes)
        except BudgetError as error:
            if (error.smallest_bytes or 0) > (refusal.smallest_bytes or 0):
                error.add("Nor does the budget hold optimizer.step().")
                return error
        return refusal

    def _plan_within(self, graph: StepGraph, limit: int | None, margin_bytes: int) -> Plan:
        """A plan for the limit, less what was seen to come on top."""
        target, enough = limit, plain(graph).peak_bytes + margin_bytes  # for nothing to be evicted
        if limit is not None:
            target = (limit if enough <= limit else limit - budgets.slack_bytes(limit)) - margin_bytes
        if limit is None or enough <= limit or self.policy != "optimal":
            return self._searched(graph, limit, target, margin_bytes, enough)
        room = limit - margin_bytes
        plan = carried(graph, max(1, target or 0), self._cache.of(graph), room)
        plan = plan or self._searched(graph, limit, target, margin_bytes, enough)
        keep(self._cache, graph, plan, room)
        return plan

    def _searched(
        self, graph: StepGraph, limit: int | None, target: int | None, margin_bytes: int, enough: int
    ) -> Plan:
        """The policy's plan for ``target`` bytes, or for the least that works where that is within the
        limit.
        """
        try:
            return make(graph, budget=None if target is None else max(1, target), policy=self.policy)
        except BudgetError as error:
            least = error.smallest_bytes
            if least is None or limit is None:
                raise
            if least + margin_bytes > limit:
                smallest = min(enough, budgets.with_slack(least + margin_bytes) + 1)
                raise self._refusal(error, graph, limit, smallest) from None
        return make(graph, budget=least, policy=self.policy)

    def _refusal(self, error: BudgetError, graph: StepGraph, limit: int, smallest: int) -> BudgetError:
        """The planner's refusal with the budget as it was given, the smallest one that will be accepted, and
        the optimizer's state apart from what else stands.
        """
        standing = error.parts.pop(budgets.STANDING, 0)
        state = min(self.optimizer_bytes, standing)
        rest = {budgets.STATE: state, budgets.STANDING: standing - state}
        return budgets.too_small(
            limit,
            smallest,
            {name: count for name, count in (*rest.items(), *error.parts.items()) if count},
            policy=error.policy,
            plain_peak_bytes=self._plain_peak(graph) if str(self.budget).rstrip().endswith("%") else None,
            detail=error.detail,
        )

    def _balance(self, kind: Kind, graph: StepGraph, limit: int | None) -> None:
        """Where the optimizer leaves its share of the host open: move as much of its state as takes less time
        than recomputing would.
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
                return self._plan_within(moved, limit, kind.margin_bytes).predicted_extra_seconds
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

    # ---- what a step needs beside what it was seen to take ---------------------------------------

    def _plain_peak(self, graph: StepGraph) -> int:
        """What percentages are of, collectives under way included: a smaller step, as the last of an epoch,
        has as much memory as those before it.
        """
        return max(plain(graph).peak_bytes + overlapped_bytes(graph), self._greatest_plain)

    def _without_kept(self, graph: StepGraph) -> StepGraph:
        """The graph with the operations that were found not to reproduce marked so."""
        kept = self.kept
        return graph.with_operations(
            lambda op: replace(op, replayable=False, reason=kept[op.name]) if op.name in kept else op
        )

    def _whole(self, graph: StepGraph) -> StepGraph:
        """Count everything of the model's and the optimizer's that stood before the step, used by it or
        not.
        """
        own = resident_bytes(self.model)
        seen = sum(s.bytes for s in graph.storages if s.kind in ("parameter", "buffer", "gradient"))
        there = {name for name, p in self.model.named_parameters() if gradient_of(p) is not None}
        # gradients that the step made
        made = sum(s.bytes for s in graph.storages if s.name in there and s.producer is not None)
        state = self.optimizer_bytes + self.moved_bytes
        return replace(graph, resident_bytes=graph.resident_bytes + max(0, own - made - seen) + state)

    @property
    def optimizer_bytes(self) -> int:
        """What of a graph's resident bytes is the optimizer's state on the device."""
        return self._optimizer_need().state_bytes if self.optimizer is not None else 0

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
        parameters = sum(parameter.nbytes for parameter in self.model.parameters())
        parts = {
            budgets.PARAMETERS: parameters,
            budgets.GRADIENTS: standing - need.state_bytes - parameters,
            budgets.STATE: need.state_bytes,
            "its update": need.step_bytes,
        }
        detail = "An optimizer with fused=True takes less for its update." if need.step_bytes else ""
        return budgets.too_small(limit, least, parts, subject="optimizer.step()", detail=detail)
