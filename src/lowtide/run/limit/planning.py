"""From an entry to its plan: the profiled step is transformed, and a plan is chosen within the budget.

In: an entry whose step graph is known. Out: the step as it is planned for, and its `Plan`; or the refusal.
The book makes a `Planned` of the two. Read `PlanMaker.make` first, and `_choose`, which is the path:
transform, settle what the step may take (`Demand`), choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch

from lowtide import accelerator
from lowtide import budget as budgets
from lowtide.errors import BudgetError
from lowtide.extension import Claim, Extension, Face
from lowtide.graph import StepGraph, no_collection
from lowtide.meter.resident import model_device
from lowtide.plan import make, resolve
from lowtide.plan.data import Plan, in_one_line
from lowtide.plan.policies.build import Policy
from lowtide.plan.simulate import plain
from lowtide.progress import working
from lowtide.run.limit.checks import Demand, refuse_nested
from lowtide.run.limit.entry import Entry
from lowtide.run.messages import Once, warn
from lowtide.run.record.engine import forms
from lowtide.run.transforms import (
    spread,
    with_crossing,
    with_earlier_gradients,
    with_overhead,
    with_resident,
    with_unreplayable,
)

_SEARCH_SECONDS = 0.7
"""How long a search may take that a step waits for."""

_SEARCH_STEPS = 10
"""The same in plain steps, where that is more."""

_RAISED = 1.125
"""By how much a share is raised before that is said, and plans are made anew."""

_LEAST_SECONDS = 0.05
"""How long a search may take that other ranks wait for; a plain step, where that is more."""


@dataclass(frozen=True)
class Patience:
    """How long a step waits for a search.

    Attributes:
        policy: makes the plan; its search ends in time.
        finds_budget: the budget is ``"min"``, and other ranks wait: what the search finds in that time is the
            budget.
    """

    policy: str | Policy
    finds_budget: bool = False


@dataclass(frozen=True)
class Problem:
    """A step to plan for.

    Attributes:
        graph: the step, as transformed (`PlanMaker.transform`).
        free_bytes: what a plan leaves free of the budget.
        patience: how long the step waits for a search.
        claim: what the extensions take beside the step.
        shares_plan: several ranks hold one plan.
    """

    graph: StepGraph
    free_bytes: int
    patience: Patience
    claim: Claim
    shares_plan: bool

    def with_resident(self, more: int) -> Problem:
        """The same problem with so many more resident bytes."""
        return replace(self, graph=with_resident(self.graph, more))

    def plan_within(self, limit: int | None) -> Plan:
        """A plan within a limit of so many bytes, less ``free_bytes``. ``None`` is no limit.

        A step that needs eviction is planned for a little less than that, or for all of it if less fails.

        Raises:
            BudgetError: no plan fits; says the smallest peak of any.
        """
        if limit is None:
            return make(self.graph, policy=self.patience.policy)
        most = limit - self.free_bytes
        evicts = plain(self.graph).peak_bytes > most
        left = budgets.slack_bytes(limit) + int(limit * spread(self.graph))
        target = max(1, most - left if evicts else most)
        policy = self.patience.policy
        try:
            plan = make(self.graph, target, policy, progress=False)
        except BudgetError as error:
            if error.smallest_bytes is None or error.smallest_bytes > most:
                raise
            plan = make(self.graph, error.smallest_bytes, policy, progress=False)
        if plan.predicted_peak_bytes > most:  # a policy of the user's that knows no budget
            raise BudgetError(None, plan.predicted_peak_bytes, budget_bytes=most)
        return plan

    def extra_seconds(self, limit: int) -> float:
        """What a plan within a limit adds to the step; infinite where none fits."""
        try:
            return self.plan_within(limit).predicted_extra_seconds
        except BudgetError:
            return math.inf

    def fits(self, limit: int) -> bool:
        """Whether some plan keeps within so many bytes, such as those that an extension claims."""
        reaches = limit >= self.graph.resident_bytes + self.free_bytes
        return bool(limit) and reaches and self.extra_seconds(limit) < math.inf

    def budget_for(self, peak_bytes: int) -> float:
        """The budget in bytes for a plan of this peak: with ``free_bytes``, and with a share for sizes that
        depend on values.
        """
        return (peak_bytes + self.free_bytes) / (1 - spread(self.graph))


class PlanMaker:
    """Makes the plans of one model, between steps, never while one runs.

    Args:
        model: the model.
        budget: as given to `limit_memory`.
        policy: a policy or its name.
        progress: as of `limit_memory`.
        extensions: of the limit.
        face: puts what is refused into words.
        plan_seconds: as of `limit_memory`.

    Attributes:
        asked: the budget.
        extensions: of the limit, in their order.
        budget_bytes: the one number that every step is held to, of whatever kind. Of a share, "min" or "auto"
            it is ``None`` before the first step was seen, and never falls until another budget is given.
        asked_bytes: what a share has come to by the steps of this process, which other ranks may not know.
        version: how often another budget or optimizer was given, or a longer step has raised the number.
        findings: names of the operations that do not reproduce, with the reason: every plan keeps what they
            write.
        solved: how many plans took a search. A step that fits as it is takes none.
        greatest_plain: the plain peak of the largest step that was planned, which a percentage is of.
        warn_once: warns of something once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        budget: str | int | None,
        policy: str | Callable[..., Plan],
        progress: bool | None = None,
        extensions: Iterable[Extension] = (),
        plan_seconds: float | None = None,
        *,
        face: Face,
    ) -> None:
        self._face = face
        self.model, self.policy, self.progress, self.plan_seconds = model, policy, progress, plan_seconds
        self.asked, self.version = budgets.Asked.of(budget), 0
        self.budget_bytes, self.asked_bytes = self.asked.fixed_bytes, 0
        self._told_bytes = self.budget_bytes  # the number that was said last
        self.warn_once = Once()
        self.extensions: tuple[Extension, ...] = ()
        self.extend(*extensions)
        self.findings: dict[str, str] = {}
        self.solved = 0
        self.greatest_plain = 0

    def groups(self) -> Mapping[str, Any]:
        """Process groups over which plans may keep values in parts, by name."""
        return {name: group for one in self.extensions for name, group in one.groups.items()}

    def set_budget(self, budget: str | int) -> None:
        """Plan for another budget from now on."""
        self.asked, self.version = budgets.Asked.of(budget), self.version + 1
        self.budget_bytes, self.asked_bytes = self.asked.fixed_bytes, 0
        self._told_bytes = self.budget_bytes

    def raise_to(self, limit_bytes: int, together: bool = False) -> None:
        """Hold steps to this number from now on, where it is larger: a longer step has raised a share, or one
        needs more than "min" was so far. That is said. A share that ranks raise ``together`` waits for them.
        """
        before = self.budget_bytes
        if self.asked.share:
            self.asked_bytes = max(self.asked_bytes, limit_bytes)
            if before is not None and self.raises_together and not together:
                return
        self.budget_bytes = max(before or 0, limit_bytes)
        told, self._told_bytes = self._told_bytes or self.budget_bytes, self.budget_bytes
        if self.budget_bytes <= told * (1 if self.asked.word == "min" else _RAISED):
            self._told_bytes = told
            return
        old, new = budgets.format_bytes(told), budgets.format_bytes(self.budget_bytes)
        if self.asked.share:
            self.version += 1
            warn(f"the budget of {self.budget} is {new} from now on, and was {old}: a larger step has run")
        else:
            warn(f'the budget of "{self.budget}" is {new} from now on, and was {old}: a step needs more')

    def extend(self, *more: Extension, without: str = "") -> None:
        """Hold more extensions from now on, and none of the name ``without``."""
        for extension in more:
            extension.attach(self)
        stays = (extension for extension in self.extensions if extension.name != without)
        self.extensions = (*stays, *more)

    @cached_property
    def forms(self) -> Any:
        """What the operations of the model's steps need."""
        return forms(model_device(self.model).type)

    @property
    def budget(self) -> str | int | None:
        """The budget as it was given."""
        return self.asked.given

    @property
    def shares_plan(self) -> bool:
        """Whether several ranks hold one plan."""
        return any(map(attrgetter("shares_plan"), self.extensions))

    @property
    def raises_together(self) -> bool:
        """Whether other ranks hold the same number of bytes."""
        return any(map(attrgetter("raises_together"), self.extensions))

    @property
    def is_awaited(self) -> bool:
        """Whether others wait in a step until there is a plan."""
        return any(map(attrgetter("awaited"), self.extensions))

    @property
    def claim(self) -> Claim:
        """What the extensions take beside a step, now."""
        return Claim.of(self.extensions) if self.extensions else Claim()

    @property
    def claimed_bytes(self) -> int:
        """What the extensions have on the device now."""
        claim = self.claim
        return claim.resident_bytes - claim.to_come_bytes

    def refusal(self, limit: int | None) -> BudgetError | None:
        """Why what an extension claims cannot be held within the budget; ``None`` where all can."""
        if limit is None:
            return None
        for extension in self.extensions:
            if (found := extension.refusal(limit)) is not None:
                return found
        return None

    def make(self, entry: Entry, budget: str | int | None) -> tuple[StepGraph, Plan]:
        """A plan for an entry's step within a budget.

        Args:
            entry: of the step.
            budget: the user's, or the smallest one in bytes that an earlier refusal named.

        Returns:
            The step that is planned for, as transformed, and the plan.

        Raises:
            BudgetError: no plan fits.
        """
        assert entry.graph is not None
        past = "planned again" if entry.planned is not None else "planned"
        if entry.borrowed:
            past = "planned for steps that add to gradients"
        device = model_device(self.model)
        with accelerator.as_current(device), working("planning", past, self.progress) as work:
            work.say(f"planning a step (operations: {len(entry.graph.operations):,})")
            with no_collection():
                graph, plan, limit = self._choose(entry, budget)
            work.done(in_one_line(plan))
        self.solved += not plan.changes_nothing
        return graph, replace(plan, budget_bytes=limit)

    # ---- the path --------------------------------------------------------------------------------

    def _choose(self, entry: Entry, budget: str | int | None) -> tuple[StepGraph, Plan, int | None]:
        """A plan for an entry's step within a budget. The arguments are those of `make`.

        Returns:
            The step that is planned for, as transformed; the plan, which names as its budget what the policy
            was given; and the budget in bytes.

        Raises:
            BudgetError: no plan fits; in a user's words.
        """
        demand = None
        try:
            graph = self.transform(entry)
            patience = self._patience(graph, budget)
            problem = Problem(graph, entry.facts.hidden_bytes, patience, self.claim, self.shares_plan)
            demand = self._demand(entry, problem, budget)
            problem = replace(problem, graph=demand.graph, claim=self.claim)
            plan, limit = self._plan_for(problem, demand)
            if entry.facts.nested and not plan.changes_nothing:
                refuse_nested(entry)
        except BudgetError as error:
            refuse_nested(entry)
            state_bytes = self.claim.resident_bytes
            raise self._face.advise(error, entry, self.model, state_bytes, demand) from None
        self.greatest_plain = max(self.greatest_plain, demand.plain_peak_bytes)
        return demand.graph, plan, limit

    def transform(self, entry: Entry) -> StepGraph:
        """An entry's step as it is planned for: its profile, and what that does not show. These are gradients
        that exist before the step, the executor's own time, what never runs again, and what else is resident:
        the rest of the model, and what the extensions claim.
        """
        assert entry.graph is not None
        graph = with_earlier_gradients(entry.graph) if entry.borrowed else entry.graph
        graph = with_crossing(with_overhead(graph), entry.forward_spans)
        graph = with_unreplayable(graph, self.findings)
        claim = self.claim
        return with_resident(graph, entry.facts.unused_bytes + claim.resident_bytes + claim.moved_bytes)

    def _patience(self, graph: StepGraph, budget: str | int | None) -> Patience:
        """How long a step may wait for a search: ``plan_seconds``, or by default for as long as is usual."""
        hurries = any(map(attrgetter("hurries"), self.extensions))
        usual = self.policy == "optimal" or getattr(self.policy, "usual", False)
        if self.plan_seconds is None and not hurries and not usual:
            return Patience(self.policy)
        from lowtide.plan.policies.chosen import hurried, searches

        least, steps = (_LEAST_SECONDS, 1) if hurries else (_SEARCH_SECONDS, _SEARCH_STEPS)
        seconds = self.plan_seconds or max(least, steps * graph.plain_seconds)
        policy = resolve(self.policy)
        finds = hurries and searches(policy) and budgets.asks_for(budget) == "min"
        return Patience(hurried(policy, seconds, graph.device, hurries), finds)

    def _demand(self, entry: Entry, problem: Problem, budget: str | int | None) -> Demand:
        """What an entry's step may take of the budget; what extensions claim may make room before.

        Raises:
            BudgetError: the budget is ``"auto"``, and too little is free.
        """
        plain_peak = max(plain(problem.graph).peak_bytes + entry.facts.hidden_bytes, self.greatest_plain)
        claim, limit = problem.claim, None
        whole_peak = max(plain_peak, claim.peak_bytes + claim.moved_bytes)
        if budget is not None:
            finds = problem.patience.finds_budget
            limit = most = whole_peak if finds else self._limit_bytes(budget, problem, whole_peak)
            for extension in self.extensions:
                extension.make_room(
                    lambda fewer: problem.with_resident(-fewer).extra_seconds(most), problem.shares_plan
                )
        refusal = self.refusal(limit)
        for extension in self.extensions:
            refusal = extension.agree(refusal)
        share = whole_peak if str(budget).rstrip().endswith("%") else None
        graph = with_resident(problem.graph, -self.claim.moved_bytes)
        return Demand(graph, limit, problem.free_bytes, plain_peak, share, refusal)

    def _limit_bytes(self, budget: str | int, problem: Problem, whole_peak: int) -> int:
        """The budget in bytes. A percentage is of the plain step with collectives under way, or of the
        largest step that was planned, so that the last one of an epoch has no smaller budget, and of the
        optimizer's own step where that takes more; ``"min"`` includes what is left free, and holds the
        optimizer's own step.
        """
        graph, patience = problem.graph, problem.patience

        def smallest() -> int:
            updating = problem.claim.peak_bytes
            if not patience.finds_budget and problem.fits(updating):
                return updating
            try:
                # of one byte no plan fits, and the refusal says what does
                policy, limit = (patience.policy, None) if patience.finds_budget else (self.policy, 1)
                least = make(graph, limit, policy).predicted_peak_bytes
            except BudgetError as error:
                if error.smallest_bytes is None:
                    raise
                least = error.smallest_bytes
            return max(math.ceil(problem.budget_for(least)), updating)

        # of what is to come "auto" finds nothing allocated
        resident = graph.resident_bytes - problem.claim.to_come_bytes
        device = torch.device(graph.device)
        limit = budgets.resolve(budget, whole_peak, smallest, device, resident_bytes=resident)
        if budget == self.budget:
            self.raise_to(limit)
            limit = self.budget_bytes or limit
        return limit

    # ---- choosing --------------------------------------------------------------------------------

    def _plan_for(self, problem: Problem, demand: Demand) -> tuple[Plan, int | None]:
        """A plan, and the budget in bytes that it is for.

        Raises:
            BudgetError: no plan fits, or what an extension claims does not; without a user's words.
        """
        limit, refusal, finds_budget = demand.limit_bytes, demand.refusal, problem.patience.finds_budget
        if refusal is not None and not problem.shares_plan and problem.fits(refusal.smallest_bytes or 0):
            raise refusal  # no search for a smaller step
        plan = self._solve(problem, None if finds_budget else limit)
        if refusal is not None:
            raise refusal
        if finds_budget:
            least = budgets.with_slack(problem.budget_for(plan.predicted_peak_bytes))
            self.raise_to(max(least, problem.claim.peak_bytes))
            limit = self.budget_bytes
        if limit is not None:
            for extension in self.extensions:
                plan = extension.admit(plan, problem, limit)
        return plan, limit

    def _solve(self, problem: Problem, limit: int | None) -> Plan:
        """A plan, as the extensions have it solved: the first is asked, which asks the next."""

        def planned(limit: int | None) -> Plan:
            try:
                return problem.plan_within(limit)
            except BudgetError as error:
                error.with_traceback(None)  # as `in_words`
                raise error.stating(budget_bytes=limit) from None  # the planner was given less (`free_bytes`)

        solve: Callable[[int | None], Plan] = planned
        for extension in reversed(self.extensions):
            solve = partial(extension.solve, solve, problem.graph)
        return solve(limit)
