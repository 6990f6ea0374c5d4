"""Plan a step of compiled graphs: one that was recorded, or one graph that is a whole step.

A graph that returns the loss is a step with one call. What it is planned for is known when it is captured, so
no recorded step is waited for, and where its plan and its code are on disk it is not even traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide.compiled.capture import FREES_AT_ONCE, CapturedGraph, Cutter, PartGraph, Sizes
from lowtide.compiled.choose_cuts import (
    Asked,
    Choice,
    Chosen,
    CutSearch,
    at_once,
    choice_of,
    fallback_bytes,
    search_within,
)
from lowtide.compiled.cut import Halves
from lowtide.compiled.dynamic import Numbers, search_range
from lowtide.compiled.joint import Joint
from lowtide.compiled.lower import Size
from lowtide.compiled.moving import Way
from lowtide.compiled.price import CandidateCuts
from lowtide.compiled.shelf import Shelf, cache_key, facts_of, ways_in
from lowtide.compiled.timeline import Timeline
from lowtide.errors import BudgetError, PlanError
from lowtide.meter import resident_bytes
from lowtide.meter.resident import model_device, workspace_bytes
from lowtide.plan.data import Plan
from lowtide.private import inductor, partitioning
from lowtide.private.captured import Captured


@dataclass(frozen=True)
class Found:
    """How the calls of a step are cut.

    Attributes:
        plan: of the step.
        ways: of its calls.
        chosen: what they take; ``None`` where the plan was found on disk.
    """

    plan: Plan
    ways: list[Way]
    chosen: Chosen | None = None


def plan_step(
    step: RecordedStep | WholeStep,
    options: dict[str, Any] | None,
    before: Sequence[Plan],
    find: Callable[[Sequence[CapturedGraph], CutSearch], Chosen],
    shelf: Shelf | None,
    chosen: Chosen | None = None,
) -> Found | None:
    """How the calls of a step are cut, as it is kept on disk or found now; ``None`` where it has no backward.

    Args:
        step: the step.
        options: Inductor's settings; ``None`` where graphs run call by call.
        before: the plans for other steps within the budget.
        find: what a search finds for calls of these graphs.
        shelf: where plans are kept, if anywhere.
        chosen: what is known to be good, so that nothing is searched for.

    Raises:
        BudgetError: no plan is found that fits.
        PlanError: as of `search_alone`.
    """
    budget = step.asked.budget
    largest = fallback_bytes(budget, before)
    key = cache_key(budget, options, step.resident_bytes, step.facts, largest) if shelf is not None else ""
    kept = ways_in(shelf.find(key), step.levels) if shelf is not None and chosen is None else None
    if kept is not None and step.is_kept(kept[1]):
        return Found(*kept)
    if chosen is None:
        if (search := step.search(largest)) is None:
            return None
        chosen = find(step.graphs, search)
    ways = [one.way for one in chosen.cuts]
    if shelf is not None:
        shelf.keep(key, facts_of(chosen.plan, ways, step.levels))
    return Found(chosen.plan, ways, chosen)


# ---- a step that was recorded ----------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedStep:
    """A step that was recorded, and what it is planned for.

    Attributes:
        asked: of its plan.
        recorded: what was taken down.
        sizes: of its calls.
        made_bytes: of parameters' gradients that there were at its end.
        gradients_bytes: of gradients that are there when it begins.
        after_bytes: as of `Beside`.
    """

    asked: Asked
    recorded: Timeline
    sizes: list[Sizes]
    made_bytes: int
    gradients_bytes: int
    after_bytes: int

    @property
    def graphs(self) -> list[PartGraph]:
        """Those of its calls."""
        return [call.graph for call in self.recorded.calls]

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The step that is planned for."""
        found = self.recorded.adding_to(self.gradients_bytes, self.made_bytes)
        return found.ending_with(self.after_bytes)

    @property
    def resident_bytes(self) -> int:
        """What is resident when it begins."""
        return self.timeline.resident_bytes

    @property
    def levels(self) -> list[int]:
        """The bytes that were recorded, moment by moment."""
        return self.timeline.levels

    @property
    def facts(self) -> list[Any]:
        """What its plan follows from, beside bytes, in JSON's words."""
        joints = [graph.joint.facts for graph in self.graphs]
        return [self.timeline.facts, joints, self.sizes, self.asked.facts]

    def is_kept(self, ways: Sequence[Way]) -> bool:
        """Whether a plan on disk is enough to run it: always, for code that is not on disk is compiled."""
        return True

    def choice(self, asked: Asked | None = None) -> Choice:
        """How to cut its calls, as it was asked or in another way."""
        candidates = list(map(PartGraph.candidates_at, self.graphs, self.sizes))
        return choice_of(self.timeline, candidates, asked or self.asked)

    def search(self, largest_bytes: int) -> CutSearch:
        """Search for its cuts within its budget."""

        def search(budget: str | int) -> CutSearch:
            return self.choice(replace(self.asked, budget=budget)).search()

        return search_within(search, self.asked.budget, largest_bytes)


# ---- a step that is one graph -----------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """What a plan for a graph that is a whole step follows from, beside the graph; plain figures.

    Attributes:
        asked: of the plan.
        options: Inductor's settings; ``None`` where graphs run call by call.
        resident_bytes: what is resident, parameters included; ``None`` where the graph's inputs are all that
            is known.
        after_bytes: the most live bytes when backward has ended; 0 for what the graph returns.
        held: structure of a graph -> sizes up to which its largest plan within the budget holds;
            `search_range` reads it, and adds to it.
    """

    asked: Asked
    options: dict[str, Any] | None
    resident_bytes: int | None = None
    after_bytes: int = 0
    held: dict[str, Numbers] = field(default_factory=dict)

    @property
    def facts(self) -> list[Any]:
        """What plans follow from beside the bytes that are resident, in JSON's words."""
        return [self.asked.facts, self.after_bytes, self.resident_bytes is None]


@dataclass(frozen=True)
class WholeStep:
    """A step that is one graph, and what it is planned for.

    Attributes:
        graph: the graph.
        beside: what there is beside it.
        levels: none, as nothing was recorded.
    """

    graph: CapturedGraph
    beside: Beside
    levels: Sequence[int] = ()

    @property
    def asked(self) -> Asked:
        """Of its plan."""
        return self.beside.asked

    @property
    def graphs(self) -> list[CapturedGraph]:
        """That of its call."""
        return [self.graph]

    @property
    def resident_bytes(self) -> int:
        """What is resident beside what the graph is given and makes."""
        return self.beside.resident_bytes or 0

    @property
    def facts(self) -> list[Any]:
        """What its plan follows from, beside bytes that are resident, in JSON's words."""
        return [self.beside.facts, self.graph.facts]

    def is_kept(self, ways: Sequence[Way]) -> bool:
        """Whether its code is on disk, cut so."""
        return self.graph.is_kept(ways[0])

    def search(self, largest_bytes: int) -> CutSearch | None:
        """As `search_alone`; ``None`` where it has no backward."""
        joint = self.graph.trace()
        return None if joint is None else search_alone(joint, self.beside, largest_bytes)


def search_alone(joint: Joint, beside: Beside, largest_bytes: int = 0) -> CutSearch:
    """Search for the cut of a graph that is a whole step. Where it leaves sizes open, it is guarded by those
    for which the plan holds.

    Args:
        joint: the graph.
        beside: what there is beside it.
        largest_bytes: as of `search_within`.

    Raises:
        BudgetError: no plan is found that fits.
        PlanError: values shall wait in tiers, and sizes are open.
    """
    asked = beside.asked
    if asked.tiers and any(partitioning.free_sizes(joint.module)):
        raise PlanError(
            "tiers are for graphs of fixed sizes, and this one leaves some open: leave out mark_dynamic "
            "(and what makes sizes follow from data), or tiers"
        )
    inputs = {joint.key_of[node] for node in joint.primals if node in joint.key_of}
    if beside.resident_bytes is not None:  # parameters are among these
        static = [joint.primals[at] for at in joint.static]
        inputs -= {joint.key_of[node] for node in static if node in joint.key_of}

    def resident_at(size_of: Size) -> int:
        return (beside.resident_bytes or 0) + sum(joint.bytes_of(key, size_of) for key in inputs)

    def search_at(size_of: Size) -> CutSearch:
        at = joint if size_of is joint.size else replace(joint, size=size_of)
        resident = resident_at(size_of)

        def search(budget: str | int) -> CutSearch:
            in_bytes = not budgets.asks_for(budget) and not budgets.is_share(budget)
            free = budgets.parse(budget) - resident if in_bytes else 0
            candidates = CandidateCuts(at, beside.options, free)
            timeline = candidates.timeline_alone(resident).ending_with(beside.after_bytes)
            return choice_of(timeline, [candidates], replace(asked, budget=budget)).search()

        return search_within(search, asked.budget, largest_bytes)

    return search_range(joint, asked.budget, search_at, resident_at, beside.held)


def cutter_within(budget: str | int) -> Cutter:
    """Cuts each joint graph that Inductor traces within a budget; beside a graph nothing is known."""
    beside, planned = Beside(Asked(budget), {}), list[Plan]()

    def halves(joint: Joint) -> Halves:
        chosen = at_once(search_alone(joint, beside, fallback_bytes(budget, planned)))
        planned.append(chosen.plan)
        return chosen.cuts[0].halves

    return Cutter({}, halves, cache_key(budget, {}, 0, beside.facts))


# ---- without compiling a kernel -------------------------------------------------------------------


class _Enough(Exception):
    """The graph is planned; nobody runs it."""


def forecast(
    model: torch.nn.Module,
    budget: str | int,
    *args: Any,
    backend: str = "inductor",
    plan_seconds: float | None = None,
) -> Plan:
    """Trace a step, plan it and predict what the backend would allocate; then stop.

    No value of a parameter or an input is read: uninitialised tensors may be given.

    Args:
        model: whose call returns the loss.
        budget: as of `lowtide.compile`.
        args: of the call.
        backend: ``inductor`` or ``aot_eager``.
        plan_seconds: as of `lowtide.compile`.

    Raises:
        BudgetError: no plan fits.
        PlanError: the model does not compile as one graph, or no gradient is asked for.
    """
    # what a cache hands out nobody plans
    options = {**FREES_AT_ONCE, **inductor.UNCACHED} if backend == "inductor" else None
    resident = resident_bytes(model) + workspace_bytes(model_device(model))
    beside = Beside(Asked(budget, plan_seconds=plan_seconds), options, resident)
    planned: list[Plan] = []

    def planning(module: Any, inputs: Any) -> Any:
        step = WholeStep(CapturedGraph(Captured(module, inputs), options), beside)
        found = plan_step(step, options, (), lambda _, search: at_once(search), None)
        if found is not None:
            planned.append(found.plan)
        raise _Enough

    compiled = torch.compile(model, backend=planning, fullgraph=True)
    try:
        compiled(*args)
    except inductor.BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, BudgetError):
            raise inner from None
        if not isinstance(inner, _Enough):
            raise
    except inductor.Unsupported as error:
        said = str(error).strip().splitlines()[0]
        raise PlanError(
            f"{type(model).__name__} does not compile as one graph ({said}): plan it without compiling, or "
            "run it under lowtide.compile, which takes graph breaks"
        ) from error
    if not planned:
        raise PlanError(f"{type(model).__name__} asks for no gradient: there is nothing to plan")
    return planned[0]
