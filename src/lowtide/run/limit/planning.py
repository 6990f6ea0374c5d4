"""From an entry to its plan: the profiled step graph is transformed, and a plan is chosen within the budget.

In: an entry whose step graph is known. Out: its `Planned`, or the refusal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from lowtide import accelerator
from lowtide import budget as budgets
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph, no_collection
from lowtide.meter import resident_bytes
from lowtide.meter.cuda import workspace_bytes
from lowtide.meter.resident import gradient_of, model_device
from lowtide.ops import IS_COLLECTIVE
from lowtide.plan import make, resolve
from lowtide.plan.background import BackgroundSearch
from lowtide.plan.choose import choose
from lowtide.plan.data import Plan, in_one_line
from lowtide.plan.layout import without_slab
from lowtide.plan.simulate import plain
from lowtide.progress import working
from lowtide.remedies import REDUCED, UPDATE
from lowtide.run.hidden_costs import with_overhead
from lowtide.run.limit.entry import Entry, History, Planned
from lowtide.run.limit.need import (
    OptimizerNeed,
    depends_on,
    missing_gradient_bytes,
    optimizer_need,
    own_share,
    spread,
)
from lowtide.run.limit.ranks import (
    Agreement,
    agreement_across,
    agreement_of,
    agreement_of_shards,
    agreement_over,
)
from lowtide.run.limit.refusal import Demand, Shortage, in_words
from lowtide.run.limit.within_reserved import RANKS, holds_reserved, reserved_bytes, within_reserved
from lowtide.run.messages import LEAST, Once, warn
from lowtide.trace.transforms import with_collectives
from lowtide.words import count_text

_SEARCH_SECONDS = 1.0
"""How long a search may take that a step waits for."""

_SEARCH_STEPS = 10
"""The same in plain steps, where that is more."""

_LEAST_SECONDS = 0.05
"""How long a search may take that other ranks wait for; a plain step, where that is more."""


class PlanMaker:
    """Makes the plans of one model, between steps, never while one runs.

    Args:
        model: the model.
        groups: process groups over which plans may shard, by name.
        budget: as given to `limit_memory`.
        policy: a policy or its name.
        optimizer: counts against the budget, or ``None``.
        progress: as of `limit_memory`.
        reserved: as of `limit_memory`.

    Attributes:
        version: how often another budget or optimizer was given.
        findings: names of the operations that do not reproduce, with the reason: every plan keeps what they
            write.
        solved: how many plans took a search. A step that fits as it is takes none.
        agreement: the ranks that share the model and its plans, or ``None``.
        replicas: the process group over which `DistributedDataParallel` averages the gradients of the step
            that was profiled last, or ``None``.
        warn_once: warns of something once.
        reduced_bytes: what gradients are copied into, between backward and the optimizer's step, while ranks
            add them up.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: Callable[[], Mapping[str, Any]],
        budget: str | int | None,
        policy: str | Callable[..., Plan],
        optimizer: torch.optim.Optimizer | None = None,
        progress: bool | None = None,
        reserved: bool | None = None,
    ) -> None:
        self.reserved = reserved
        self.model, self.policy, self.groups, self.progress = model, policy, groups, progress
        self.budget, self.optimizer, self.version = budget, optimizer, 0
        self.reduced_bytes = 0
        self.findings: dict[str, str] = {}
        self.solved = 0
        self.agreement: Agreement | None = None
        self.warn_once = Once()
        self._looked_for_ranks = False  # a copied model is not complete yet here
        self._met_peers = self._awaited = self._has_collectives = False
        self.replicas: Any = None
        self._need: tuple[Any, OptimizerNeed] | None = None
        self._moved_bytes = 0  # of the optimizer's state, to the host
        self._greatest_plain = 0  # the plain peak of the largest step that was planned

    def set_budget(self, budget: str | int) -> None:
        """Plan for another budget from now on."""
        self.budget, self.version = budget, self.version + 1

    def set_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count this optimizer from now on."""
        self.optimizer, self._moved_bytes, self.version = optimizer, 0, self.version + 1

    def make(self, entry: Entry) -> Planned:
        """A plan for an entry's step within the budget, less what the entry says is to be left free.

        Raises:
            BudgetError: no plan fits.
        """
        assert entry.graph is not None
        past = "planned again" if entry.planned is not None else "planned"
        if not entry.seen.profiles:  # the step graph is a sibling's
            past = "planned for steps that add to gradients"
        device = model_device(self.model)
        with accelerator.as_current(device), working("planning", past, self.progress) as work:
            work.say(f"planning {count_text(len(entry.graph.operations), 'operation')}")
            try:
                with no_collection():
                    graph, plan, limit = self._choose(entry)
            except BudgetError as error:
                first = entry.planned is None and not entry.room.margin_bytes
                if not (self._awaited and first and error.smallest_bytes):
                    raise
                graph, plan, limit = self._choose(entry, error.smallest_bytes)
                warn(f"{LEAST} {error}", each_time=True)
            work.done(in_one_line(plan))
        self.solved += not plan.changes_nothing
        search, goes_on = None, _ended_early(plan)
        if goes_on and (self.agreement is None or self.agreement.rank == 0):
            least = 0 if plan.budget_bytes else self._optimizer_step_bytes - entry.room.free_bytes
            with suppress(OSError):  # where no process can be started the plan stays
                search = BackgroundSearch(graph, plan.budget_bytes, self._policies(graph)[1], least)
        # ranks that share a plan take a better one together, which the first of them finds
        history = History(search=search, awaits_better=goes_on and self.agreement is not None)
        plan = replace(plan, budget_bytes=limit)
        return Planned(entry.key, entry.graph, graph, plan, entry.forward_spans, history)

    def agree_on_step(
        self, profiled: StepGraph, groups: Sequence[Any], given: Sequence[int]
    ) -> tuple[StepGraph, Agreement | None]:
        """The step to plan for, from one that was profiled.

        It has all of the model and the executor's own time. Its collectives may run again where the ranks
        that share the model agree on the program.

        Args:
            profiled: the step.
            groups: process groups over which its forward has collectives.
            given: digests of what it was given.

        Returns:
            The step, and the ranks that share the model where each has to plan alone.
        """
        ran = (op for op in profiled.operations if op.phase == "forward")
        self._has_collectives |= any(op.reason == IS_COLLECTIVE for op in ran)
        if not self._looked_for_ranks:
            self._looked_for_ranks = True
            self.agreement = (
                agreement_of(self.model) or agreement_over(self.groups()) or agreement_across(groups, given)
            )
        graph, shared = with_overhead(_with_all_of(self.model, profiled)), self.agreement
        if shared is None:
            return graph, None
        if shared.same_program(graph):
            return with_collectives(replace(graph, events=shared.broadcast(graph.events))), None
        self.agreement = None  # on every rank alike
        return graph, shared

    def exchange_stage_peaks(self, entry: Entry) -> None:
        """The ranks of a pipeline exchange what their first profiled steps take: devices are alike, so a
        percentage is of what the fullest rank takes.
        """
        if not entry.forward_spans or self._met_peers:
            return
        if (ranks := agreement_over({"stages": self.replicas})) is not None:
            own = plain(self._transform(entry)).peak_bytes + entry.room.hidden_bytes
            self._greatest_plain = max(self._greatest_plain, *ranks.gather(own))

    def peers(self) -> tuple[Agreement | None, bool]:
        """The ranks that wait for this one in a step, and whether all of them are to hold one plan.

        These are the ranks that FSDP shards the model over, which hold one, or those that DDP averages
        gradients over. ``None`` from the second time on: all ranks profile a first step together, and a later
        one perhaps alone.
        """
        if self._met_peers:
            return None, False
        self._met_peers = True
        shards = agreement_of_shards(self.model)
        found = shards or agreement_over({} if self.replicas is None else {"replicas": self.replicas})
        self._awaited = found is not None
        return found, shards is not None

    def _choose(self, entry: Entry, least: int | None = None) -> tuple[StepGraph, Plan, int | None]:
        """A plan for an entry's step, within the budget or ``least`` bytes.

        Returns:
            The step with all that exists beside it; its plan, whose budget is what the policy was given; and
            the budget in bytes.

        Raises:
            BudgetError: no plan fits; in a user's words.
        """
        demand = None
        try:
            demand = self._demand(entry, least)
            plan, limit = self._plan_for(
                demand, at_once=least is None and self._takes_least_at_once(demand.graph)
            )
        except BudgetError as error:
            raise in_words(error, entry, self.model, self.optimizer_bytes, demand) from None
        self._greatest_plain = demand.plain_peak_bytes
        return demand.graph, plan, limit

    def _demand(self, entry: Entry, least: int | None) -> Demand:
        """What is to be planned for: an entry's step, within the budget or ``least`` bytes.

        Raises:
            BudgetError: nothing is left for a budget of this kind.
        """
        graph, free = self._transform(entry), entry.room.free_bytes
        plain_peak = max(plain(graph).peak_bytes + entry.room.hidden_bytes, self._greatest_plain)
        whole_peak = max(plain_peak, self._optimizer_step_bytes + self._moved_bytes)
        limit = least or self._limit_bytes(graph, whole_peak, free)
        self._balance(graph, limit, free)
        graph = _with_resident(graph, -self._moved_bytes)
        shortage = self._shortage(limit)
        if self.agreement is not None:
            shortage = self.agreement.first_of_any(shortage)
        share = whole_peak if str(self.budget).rstrip().endswith("%") else None
        return Demand(graph, limit, free, plain_peak, share, shortage)

    def _plan_for(self, demand: Demand, at_once: bool) -> tuple[Plan, int | None]:
        """A plan, and the budget in bytes that it is for.

        Args:
            demand: what is to be planned for.
            at_once: the budget is what a short search finds to be the least.

        Raises:
            BudgetError: no plan fits, or the optimizer's own step does not; without a user's words.
        """
        graph, limit, free, shortage = demand.graph, demand.limit_bytes, demand.free_bytes, demand.shortage
        if shortage is not None and self.agreement is None and self._fits(graph, shortage.least_bytes, free):
            raise shortage.error()  # no search for a smaller step
        plan = self._solve(graph, None if at_once else limit, free)
        if shortage is not None:
            raise shortage.error()
        if at_once:
            least = (plan.predicted_peak_bytes + free) / (1 - spread(graph))
            limit = max(budgets.with_slack(least), self._optimizer_step_bytes)
        if plan.slab_bytes and limit is not None and self._shortage(limit - plan.slab_bytes):
            plan = without_slab(plan)  # it would take its bytes during optimizer.step(), too
        if limit is not None and holds_reserved(self.reserved, self.model, self.budget):
            plan = self._within_reserved(graph, plan, limit)
        return plan, limit

    def _within_reserved(self, graph: StepGraph, plan: Plan, limit: int) -> Plan:
        """A plan within the budget with what CUDA's allocator reserves for it.

        Raises:
            BudgetError: none was found.
        """
        if self.agreement is not None:
            self.warn_once("reserved", RANKS)
            return plan
        need = self.need_of(self.optimizer) if self.optimizer is not None else None
        price = functools.partial(reserved_bytes, graph, model=self.model, need=need)
        plan = within_reserved(graph, limit, plan, self._policies(graph)[0], price)
        accelerator.empty_cache()  # what the profiled step left in pieces
        return plan

    def _transform(self, entry: Entry) -> StepGraph:
        """An entry's step with what no plan recomputes, and with the optimizer's state."""
        kept, graph = self.findings, entry.graph
        assert graph is not None
        graph = graph.with_operations(
            lambda op: replace(op, replayable=False, reason=kept[op.name]) if op.name in kept else op
        )
        return _with_resident(graph, self.optimizer_bytes + self._moved_bytes)

    def _solve(self, graph: StepGraph, limit: int | None, free: int) -> Plan:
        """A plan of this rank's own, or one for all ranks that share the model."""

        def solve(limit: int | None) -> Plan:
            try:
                return self._plan_within(graph, limit, free)
            except BudgetError as error:
                error.budget_bytes = limit
                raise

        return solve(limit) if self.agreement is None else self.agreement.solve(solve, graph, limit)

    def _limit_bytes(self, graph: StepGraph, whole_peak: int, free: int) -> int | None:
        """The budget in bytes. A percentage is of the plain step with collectives under way, or of the
        largest step that was planned, so that the last one of an epoch has no smaller budget, and of the
        optimizer's own step where that takes more; ``"min"`` includes what is left ``free``, and holds the
        optimizer's own step.
        """
        if self.budget is None:
            return None

        def smallest() -> int:
            updating = self._optimizer_step_bytes
            at_once = self._takes_least_at_once(graph)
            if not at_once and self._fits(graph, updating, free):
                return updating
            try:
                policy, budget = (self._policies(graph)[0], None) if at_once else (self.policy, 1)
                least = make(graph, budget, policy).predicted_peak_bytes
            except BudgetError as error:
                if error.smallest_bytes is None:
                    raise
                least = error.smallest_bytes
            return max(math.ceil((least + free) / (1 - spread(graph))), updating)

        device, standing = torch.device(graph.device), graph.resident_bytes
        if self.optimizer is not None:
            standing -= self.need_of(self.optimizer).to_come_bytes  # of these "auto" finds none allocated
        return budgets.resolve(self.budget, whole_peak, smallest, device, standing_bytes=standing)

    def _fits(self, graph: StepGraph, limit: int | None, free: int) -> bool:
        """Whether some plan leaves so much free within a limit that the optimizer's own step sets."""
        if not limit or limit < graph.resident_bytes + free:
            return False
        try:
            self._plan_within(graph, limit, free)
        except BudgetError:
            return False
        return True

    def _plan_within(self, graph: StepGraph, limit: int | None, free: int) -> Plan:
        """A plan that leaves so much of the limit free.

        A step that needs eviction is planned for a little less, or for all of it if less does not work.

        Raises:
            BudgetError: no plan fits; says the smallest peak of any.
        """
        if limit is None:
            return make(graph, policy=self._policies(graph)[0])
        most = limit - free
        evicts = plain(graph).peak_bytes > most
        left = budgets.slack_bytes(limit) + int(limit * spread(graph))
        target = max(1, most - left if evicts else most)
        return choose(graph, most, policy=self._policies(graph)[0], target=target)

    def _policies(self, graph: StepGraph) -> tuple[str | Callable[..., Plan], Callable[..., Plan] | None]:
        """The policy, with an end to its search: a training step waits for it. And the one that goes on in a
        process of its own, or ``None``.
        """
        from lowtide.plan.policies.chosen import least_time, optimal, split_search

        if self._keeps_waiting:
            seconds = max(_LEAST_SECONDS, graph.plain_seconds)
            return split_search(resolve(self.policy), seconds, graph.device)
        if self.policy != "optimal":
            return self.policy, None
        return optimal(max(_SEARCH_SECONDS, _SEARCH_STEPS * graph.plain_seconds)), least_time

    def _takes_least_at_once(self, graph: StepGraph) -> bool:
        """Whether the budget is the least memory, and others wait for the plan: what a short search finds is
        the budget until a longer one has found less.
        """
        smallest = budgets.asks_for(self.budget) == "min"
        return smallest and self._keeps_waiting and self._policies(graph)[1] is not None

    @property
    def _keeps_waiting(self) -> bool:
        """Whether other ranks wait while this one searches: those that share the plan, that take part in the
        forward's collectives, that FSDP shards the model over, or DDP's.
        """
        waits = self.agreement is not None or self._has_collectives or self.replicas is not None
        return waits or agreement_of_shards(self.model) is not None

    # ---- the optimizer ---------------------------------------------------------------------------

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state on the device, present or still to come."""
        return self.need_of(self.optimizer).state_bytes if self.optimizer is not None else 0

    def need_of(self, optimizer: torch.optim.Optimizer) -> OptimizerNeed:
        """Bytes that an optimizer takes, worked out again only where they may have changed: that takes as
        long as planning for a small model.
        """
        asked = depends_on(optimizer)
        if self._need is None or self._need[0] != asked:
            self._need = asked, optimizer_need(optimizer)
            if unknown := self._need[1].unknown:
                self.warn_once(
                    "unknown",
                    f"what a step of {type(optimizer).__name__} allocates beside its state cannot be worked "
                    f"out ({unknown}), so only the state counts against the budget: measure "
                    "one with lowtide.measure(optimizer.step), and leave as much of the budget free",
                )
        return self._need[1]

    def _optimizer_parts(self) -> dict[str, int]:
        """What stands at the peak of the optimizer's own step, in bytes by name; nothing without one."""
        if self.optimizer is None:
            return {}
        need, own = self.need_of(self.optimizer), resident_bytes(self.model)
        own += missing_gradient_bytes(self.optimizer)
        parameters = sum(own_share(parameter).nbytes for parameter in self.model.parameters())
        return {
            budgets.PARAMETERS: parameters,
            budgets.GRADIENTS: own - parameters,
            budgets.STATE: need.state_bytes,
            budgets.WORKSPACES: workspace_bytes(model_device(self.model)),
            UPDATE: need.step_bytes,
            REDUCED: max(0, self.reduced_bytes - need.step_bytes),
        }

    @property
    def _optimizer_step_bytes(self) -> int:
        """Bytes at the peak of the optimizer's own step; 0 without one."""
        return sum(self._optimizer_parts().values())

    def _shortage(self, limit: int | None) -> Shortage | None:
        """What the optimizer's own step takes where that is above the limit, or ``None``."""
        parts = self._optimizer_parts()
        return Shortage(limit, parts) if limit is not None and sum(parts.values()) > limit else None

    def _balance(self, graph: StepGraph, limit: int | None, free: int) -> None:
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
            moved = _with_resident(graph, optimizer.device_state_bytes(share) - everything)
            try:
                return self._plan_within(moved, limit, free).predicted_extra_seconds
            except BudgetError:
                return math.inf

        share = optimizer.choose_host_fraction(extra_seconds)
        self._moved_bytes = everything - optimizer.device_state_bytes(share)


def _ended_early(plan: Plan) -> bool:
    """Whether a longer search may find a better plan."""
    if plan.policy not in ("optimal", "mixed"):
        return False
    from lowtide.plan.policies.chosen import ENDED_EARLY

    return ENDED_EARLY in plan.notes


def _with_resident(graph: StepGraph, more: int) -> StepGraph:
    """The step with so many more resident bytes."""
    return replace(graph, resident_bytes=graph.resident_bytes + more)


def _with_all_of(model: torch.nn.Module, graph: StepGraph) -> StepGraph:
    """The step with all of the model, whether it uses it or not."""
    seen = sum(s.bytes for s in graph.storages if s.kind in ("parameter", "buffer", "gradient"))
    there = {name for name, p in model.named_parameters() if gradient_of(p) is not None}
    # gradients that the step made
    made = sum(s.bytes for s in graph.storages if s.name in there and s.producer is not None)
    return _with_resident(graph, max(0, resident_bytes(model) - made - seen))
