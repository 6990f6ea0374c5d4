"""What a limit can be extended with: `Extension`, each method of which does nothing unless it is overridden.

``limit_memory(model, budget)`` on one device, with recomputation, needs no extension. All else is one: what
an optimizer takes, ranks that plan together, reserved bytes, plans that move values. A limit holds a tuple of
them, and calls each in order; what one returns is given to the next. The core imports none of them. The face
does (`lowtide.limits`), where one is asked for, or where the model needs it (`Face`).

Every extension runs one contract: `tests/extensions/test_contract.py`. With it attached, a plain model trains
with the same bits, keeps to its peak, can be copied, has nothing left of a failed step, and none of it once
its limit is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan.data import Plan

if TYPE_CHECKING:
    import torch


class Claim(NamedTuple):
    """Bytes that an extension has on the device beside the step.

    Attributes:
        resident_bytes: before, within and after each step.
        to_come_bytes: of these, what is not there yet.
        moved_bytes: what would be resident, too, and has made room.
        step_bytes: what it allocates for itself between two steps.
        peak_bytes: the most that is live then, the model's parameters and gradients included.
    """

    resident_bytes: int = 0
    to_come_bytes: int = 0
    moved_bytes: int = 0
    step_bytes: int = 0
    peak_bytes: int = 0

    @classmethod
    def of(cls, extensions: Iterable[Extension]) -> Claim:
        """What several claim together."""
        claims = [extension.claim() for extension in extensions]
        *sums, _ = (sum(each) for each in zip(*claims, strict=True)) if claims else cls()
        return cls(*sums, peak_bytes=max((one.peak_bytes for one in claims), default=0))


class Extension:
    """What a limit does beyond one device and recomputation.

    Attributes:
        name: what users call it.
        not_copied: what a copy of the limited model is told, which has none of it.
        hurries: others wait while a plan is made, so that its search is short.
        awaited: others wait in a step until there is a plan, so that one that is refused runs under the plan
            that takes least.
        shares_plan: several ranks hold one plan.
        raises_together: other ranks hold the same number of bytes, which a longer step raises on all of them.
        groups: process groups over which plans may keep values in parts, by name.
        maker: makes the limit's plans (`lowtide.run.limit.planning.PlanMaker`).
    """

    name = ""
    not_copied = ""
    hurries = False
    awaited = False
    shares_plan = False
    raises_together = False
    groups: Mapping[str, Any] = MappingProxyType({})
    maker: Any

    @property
    def model(self) -> torch.nn.Module:
        """The limited model, which is not complete yet while it is being copied."""
        return self.maker.model

    # ---- a limit ---------------------------------------------------------------------------------

    def attach(self, maker: Any) -> None:
        """A limit holds it from now on, whose plans ``maker`` makes."""
        self.maker = maker

    def copied(self) -> Extension | None:
        """What the limit of a copied or pickled model has in its place, which holds nothing of the model.

        Reserved: the same once more. Optimizer: none, since the copy has another.
        """
        return None

    def keeps(self) -> Mapping[str, Any] | None:
        """What a later process has to know of it to use plans of this one, as JSON has it; ``None`` where it
        cannot use them.

        Ranks: that they have met.
        """
        return {}

    def resumes(self, kept: Mapping[str, Any] | None) -> bool:
        """Whether plans of an earlier process may be used. Asked once, when the first step begins.

        Ranks: all of them use theirs, or none does. A collective.

        Args:
            kept: what `keeps` returned there; ``None`` where this process has no plans to use.
        """
        return True

    def given(self, budget: str | int | None) -> None:
        """A budget is given: to the limit, or to its handle later.

        Reserved: it is in bytes.

        Raises:
            PlanError: it does not go with the extension.
        """

    def close(self) -> None:
        """The limit is removed."""

    # ---- a step begins ---------------------------------------------------------------------------

    def key(self, model: torch.nn.Module) -> Hashable:
        """What of the cache key the core does not know: steps that differ in it have plans of their own.

        Ranks: the settings of FSDP, which change what is gathered, reduced and freed.
        """
        return None

    def opens(self, limiter: Any, inputs: Any) -> None:
        """A limited call of the model is about to begin, and may still be made another one.

        Tiles: modules that run in pieces from this call on. Kept plans: those of an earlier process.

        Args:
            limiter: of the model (`lowtide.run.limit.limiter.Limiter`).
            inputs: of the call (`lowtide.run.limit.key.Inputs`).
        """

    def gather(self, item: Any) -> list[Any]:
        """What each rank that runs the same operations as this one gives; of a process alone its own item.

        Ranks: those that share layers or sequences. A collective.
        """
        return [item]

    def recalls(self, book: Any, key: Any) -> bool:
        """Whether it has put entries into the book: a step comes whose key has none.

        Kept plans: those of an earlier process.

        Args:
            book: of the limit (`lowtide.run.limit.book.PlanBook`).
            key: of the step (`lowtide.run.limit.key.StepKey`).
        """
        return False

    def begins(self, entry: Any) -> None:
        """A step of an entry (`lowtide.run.limit.entry.Entry`) begins, before it is known how it runs.

        Ranks: they exchange what the last step showed.
        """

    def prepare(self, plan: Plan, device: torch.device) -> None:
        """A step under a plan is about to begin, and to be measured from then on.

        Moves: where moved values wait, and the slab that they come back into.
        """

    def around(self, step: Any) -> AbstractContextManager[None]:
        """Around a forward of a step (`lowtide.run.limit.step`: a `ProfiledStep` or a `PlannedStep`).

        Ranks: who averages the gradients, and what is gathered. Moves: what fetches and stores the values
        that the plan moves.
        """
        return nullcontext()

    def sources(self, index: Any, plan: Plan) -> Any:
        """Where evicted values come back from under a plan (`lowtide.plan.simulate.index.Sources`); ``None``
        where all are recomputed.

        Moves: some are fetched.

        Args:
            index: of the step (`lowtide.plan.simulate.index.StepIndex`).
            plan: the plan.
        """
        return None

    # ---- from a profiled step to its plan --------------------------------------------------------

    def transform(self, graph: StepGraph, entry: Any, profiler: Any) -> StepGraph:
        """The step to plan for, from one that was just profiled.

        Ranks: they agree on the program, so that its collectives may run again.

        Args:
            graph: the step.
            entry: of the step (`lowtide.run.limit.entry.Entry`).
            profiler: of the step (`lowtide.run.profile.profiler.Profiler`).
        """
        return graph

    def claim(self) -> Claim:
        """What it takes beside the step.

        Optimizer: its state, and its own step, which a budget holds, too.
        """
        return Claim()

    def make_room(self, extra_seconds: Callable[[int], float], shares_plan: bool) -> None:
        """Take less, where that costs less time than recomputing more.

        Optimizer: some of its state moves to the host.

        Args:
            extra_seconds: what a plan adds to a step where so many bytes less are resident; infinite where no
                plan fits.
            shares_plan: ranks share the plan.
        """

    def refusal(self, limit_bytes: int) -> BudgetError | None:
        """Why what it claims cannot be held within a budget, whatever the plan; ``None`` where it can.

        Optimizer: its own step takes more.
        """
        return None

    def agree(self, refusal: BudgetError | None) -> BudgetError | None:
        """The refusal of all, from this process's own.

        Ranks: that of the first one that has one.
        """
        return refusal

    def solve(self, solve: Callable[[int | None], Plan], graph: StepGraph, limit_bytes: int | None) -> Plan:
        """A plan for a step.

        Ranks: one plan for all of them, for the fewest bytes that any has left.

        Args:
            solve: from a budget in bytes to a plan; what is next in the tuple, the planner at last.
            graph: the step, as it is planned for.
            limit_bytes: the budget, or ``None``.

        Raises:
            BudgetError: no plan fits.
        """
        return solve(limit_bytes)

    def admit(self, plan: Plan, problem: Any, limit_bytes: int) -> Plan:
        """The plan, or another that keeps to what it demands, too.

        Reserved: what the allocator reserves is within the budget. Moves: the slab leaves the optimizer room.

        Args:
            plan: within the budget.
            problem: the step, and how to plan for it (`lowtide.run.limit.planning.Problem`).
            limit_bytes: the budget.

        Raises:
            BudgetError: none does.
        """
        return plan

    def settle(self, entry: Any, refusal: BudgetError | None) -> BudgetError | None:
        """A step was profiled, and planned for or refused, for the first time or again. What is raised.

        Ranks: what one refuses is raised on all of them, and those that FSDP shards the model over begin with
        one plan.
        """
        return refusal


class Face(Protocol):
    """What composes limits. It alone imports extensions; the core asks it for those that a limit needs."""

    def counting(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Extension:
        """What counts an optimizer.

        Raises:
            PlanError: it is no optimizer of the model's parameters.
        """
        ...

    def missing(self, limiter: Any, budget: str | int | None) -> Sequence[Extension]:
        """The extensions that a limit needs by now, for this budget, and does not have: asked when a budget
        is given, and before a step is profiled.
        """
        ...

    def advise(
        self, error: BudgetError, entry: Any, model: torch.nn.Module, state_bytes: int, demand: Any
    ) -> BudgetError:
        """The planner's refusal of a step in a user's words.

        Args:
            error: the planner's, with facts, or that of what an extension claims.
            entry: of the step (`lowtide.run.limit.entry.Entry`).
            model: the limited one.
            state_bytes: what extensions claim beside it.
            demand: the step and its budget (`lowtide.run.limit.checks.Demand`), once these are known.
        """
        ...

    def follow(self, limiter: Any) -> None:
        """Tell what to do about this limit when its device, a card, has no memory left."""
        ...

    def compiled(self, limiter: Any) -> Any:
        """What gives the steps of a limit that `torch.compile` is around to the compiled engine
        (`lowtide.compiled.around.Delegate`).
        """
        ...


def sources(extensions: tuple[Extension, ...], index: Any, plan: Plan) -> Any:
    """Where evicted values come back from under a plan; see `Extension.sources`."""
    return next((found for one in extensions if (found := one.sources(index, plan)) is not None), None)
