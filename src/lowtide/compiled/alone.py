"""A graph that is a whole step, its loss included: what it is planned for is known when it is captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import fx

from lowtide.compiled.capture import FREES_AT_ONCE, CapturedGraph, Cutter, Run
from lowtide.compiled.choose_cuts import Chosen, CutSearch, at_once, choice_alone, search_within
from lowtide.compiled.cut import Halves
from lowtide.compiled.dynamic import Numbers, plan_range
from lowtide.compiled.joint import Joint
from lowtide.compiled.lower import Size
from lowtide.compiled.shelf import digest, open_shelf, plan_in
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.marked_regions import wishes_of
from lowtide.meter import resident_bytes
from lowtide.meter.cuda import workspace_bytes
from lowtide.meter.resident import model_device
from lowtide.plan.data import Offload, Plan
from lowtide.private import inductor, partitioning
from lowtide.private.captured import Captured


@dataclass(frozen=True)
class WholeStep:
    """What a graph that is a whole step is planned for.

    Attributes:
        budget: as of `lowtide.limit_memory`.
        options: Inductor's settings; ``None`` where graphs run call by call.
        resident_bytes: what is resident beside a graph, parameters included; ``None`` where the graph's
            inputs are all that is known.
        tiers: where saved values may wait.
        after_bytes: the most live bytes when backward has ended; 0 for what the graph returns.
    """

    budget: str | int
    options: dict[str, Any] | None
    resident_bytes: int | None = None
    tiers: tuple[Offload, ...] = ()
    after_bytes: int = 0

    def digest(self, *facts: Any) -> str:
        """What a plan follows from, beside its graph.

        Args:
            facts: anything else.
        """
        tiers = [astuple(tier) for tier in self.tiers]
        return digest(self.budget, self.options, self.resident_bytes, tiers, self.after_bytes, *facts)

    def plan(
        self,
        joint: Joint,
        before: Sequence[Plan] = (),
        held: dict[str, Numbers] | None = None,
        find: Callable[[CutSearch], Chosen] = at_once,
    ) -> Chosen:
        """How to cut a graph; where it leaves sizes open, it is guarded by those for which the plan holds.

        Args:
            joint: the graph.
            before: the plans for other graphs within the budget.
            held: as of `plan_range`.
            find: what a search finds.

        Raises:
            BudgetError: no plan is found that fits.
            PlanError: values shall wait in tiers, and sizes are open.
        """
        if self.tiers and any(partitioning.free_sizes(joint.module)):
            raise PlanError(
                "tiers are for graphs of fixed sizes, and this one leaves some open: leave out mark_dynamic "
                "(and what makes sizes follow from data), or tiers"
            )
        inputs = {joint.key_of[node] for node in joint.primals if node in joint.key_of}
        if self.resident_bytes is not None:  # parameters are among these
            static = [joint.primals[at] for at in joint.static]
            inputs -= {joint.key_of[node] for node in static if node in joint.key_of}

        def resident_at(size_of: Size) -> int:
            return (self.resident_bytes or 0) + sum(joint.bytes_of(key, size_of) for key in inputs)

        def plan_at(size_of: Size) -> Chosen:
            at = joint if size_of is joint.size else replace(joint, size=size_of)

            def search(budget: str | int) -> CutSearch:
                resident = resident_at(at.size)
                return choice_alone(at, budget, resident, self.options, self.tiers, self.after_bytes).search()

            return find(search_within(search, self.budget, before))

        return plan_range(joint, self.budget, plan_at, resident_at, {} if held is None else held)

    def compile(
        self,
        module: fx.GraphModule,
        inputs: Any,
        before: Sequence[Plan],
        held: dict[str, Numbers],
        find: Callable[[Sequence[CapturedGraph], CutSearch], Chosen],
    ) -> tuple[Run, Plan | None, StepGraph | None]:
        """What runs a graph, its plan, and the step graph that this was made for. Where the plan and the code
        are on disk nothing is traced, and no step graph is known.

        Args:
            module: Dynamo's graph.
            inputs: its (fake) inputs.
            before, held: as of `plan`.
            find: what a search finds for the calls of these graphs.

        Raises:
            BudgetError, PlanError: as of `plan`.
        """
        facts = self.digest(wishes_of(module))
        graph = CapturedGraph(Captured(module, inputs), self.options, facts)
        shelf, place = open_shelf(self.options), f"{facts} {graph.captured.facts}"
        if shelf is not None and (kept := plan_in(shelf.find(place))) is not None:
            plan, key = kept
            if (run := graph.run_kept(key)) is not None:
                return run, plan, None
        joint = graph.trace()
        if joint is None:
            return graph.run_plain(), None, None
        chosen = self.plan(joint, before, held, functools.partial(find, [graph]))
        way = chosen.cuts[0].way
        run = graph.run_as(way)
        if shelf is not None:
            shelf.keep(place, [chosen.plan.to_json(), graph.key_of(way)])
        return run, chosen.plan, chosen.graph


def cutter_within(budget: str | int) -> Cutter:
    """Cuts each joint graph that Inductor traces within a budget; beside a graph nothing is known."""
    step, planned, held = WholeStep(budget, {}), list[Plan](), dict[str, Numbers]()

    def halves(joint: Joint) -> Halves:
        chosen = step.plan(joint, planned, held)
        planned.append(chosen.plan)
        return chosen.cuts[0].halves

    return Cutter({}, halves, step.digest())


# ---- without compiling a kernel -------------------------------------------------------------------


class _Enough(Exception):
    """The graph is planned; nobody runs it."""


def forecast(model: torch.nn.Module, budget: str | int, *args: Any, backend: str = "inductor") -> Plan:
    """Trace a step, plan it and predict what the backend would allocate; then stop.

    No value of a parameter or an input is read: uninitialised tensors may be given.

    Args:
        model: whose call returns the loss.
        budget: as of `lowtide.compile`.
        args: of the call.
        backend: ``inductor`` or ``aot_eager``.

    Raises:
        BudgetError: no plan fits.
        PlanError: the model does not compile as one graph, or no gradient is asked for.
    """
    # what a cache hands out nobody plans
    options = {**FREES_AT_ONCE, **inductor.UNCACHED} if backend == "inductor" else None
    step = WholeStep(budget, options, resident_bytes(model) + workspace_bytes(model_device(model)))
    planned: list[Plan] = []

    def planning(module: Any, inputs: Any) -> Any:
        joint = CapturedGraph(Captured(module, inputs), options).trace()
        if joint is not None:
            planned.append(step.plan(joint).plan)
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
