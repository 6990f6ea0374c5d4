"""The object that AOTAutograd calls with a joint graph: it plans, and returns forward and backward."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide.compiled.correction import share_of_largest
from lowtide.compiled.costs import Size
from lowtide.compiled.cut import Cutter, Halves
from lowtide.compiled.dynamic import Numbers, plan_range
from lowtide.compiled.guess import Trial
from lowtide.compiled.joint import Joint
from lowtide.compiled.stored import own_facts
from lowtide.compiled.timeline import StepPlan, plan_graph
from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan.data import Offload, Plan
from lowtide.private import inductor, partitioning


@dataclass
class Report:
    """What was planned so far; who asked for it reads it, compiled code does not hold it.

    Attributes:
        planned: a plan for each graph.
        graphs: the step graphs that they were made for, by `Plan.graph`.
        held: program -> the open sizes up to which its largest plan holds.
    """

    planned: list[Plan] = field(default_factory=list)
    graphs: dict[str, StepGraph] = field(default_factory=dict)
    held: dict[str, Numbers] = field(default_factory=dict)


class Partitioner(Cutter):
    """Cuts each joint graph within a budget.

    It is immutable and can be pickled: Inductor puts a copy of it into the key of its cache, so another
    budget, version or machine compiles anew.

    Args:
        budget: as of `lowtide.limit_memory`.
        standing: bytes that stand beside a graph, where that is more than its own inputs.
        options: Inductor's settings; ``None`` where graphs run call by call.
        report: takes down what was planned, in this process alone.
        codecs: in which saved values may wait in fewer bytes.
        tiers: where saved values may wait.
        wishes: a digest of the regions that the user has marked in the graph.
    """

    def __init__(
        self,
        budget: str | int,
        standing: Callable[[], int] | None = None,
        options: dict[str, Any] | None = None,
        report: Report | None = None,
        codecs: tuple[str, ...] = (),
        tiers: tuple[Offload, ...] = (),
        wishes: str = "",
    ) -> None:
        super().__init__(options)
        self.budget, self.codecs, self.tiers, self.wishes = budget, codecs, tiers, wishes
        self._standing = standing
        self._report = Report() if report is None else report
        self._trial: Trial | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_standing": None, "_report": Report(), "_trial": None}

    def guesses(self, inputs: Sequence[Any]) -> bool:
        """Whether a first cut may be compiled unseen: nothing else follows from what it takes."""
        asked = budgets.asks_for(self.budget) == "min" or self.codecs or self.tiers
        return not asked and not any(partitioning.free_sizes_of(inputs)) and inductor.writes_python()

    @contextlib.contextmanager
    def trying(self) -> Iterator[Trial]:
        """While it lasts, a first cut is compiled unseen; a good one is taken down at the end."""
        self._trial = trial = Trial(self.budget)
        try:
            yield trial
        finally:
            self._trial = None
        if trial.plan is not None:
            self._report.planned.append(trial.plan)
            self._report.graphs[trial.plan.graph] = trial.graph

    def halves(self, joint: Joint) -> Halves:
        """Forward and backward within the budget."""
        if self.tiers and any(partitioning.free_sizes(joint.module)):
            raise PlanError(
                "tiers are for graphs of fixed sizes, and this one leaves some open: leave out mark_dynamic "
                "(and what makes sizes follow from data), or tiers"
            )
        beside = 0 if self._standing is None else self._standing()
        inputs = {joint.key_of[node] for node in joint.primals if node in joint.key_of}
        if self._standing is not None:  # parameters stand there already
            static = [joint.primals[at] for at in joint.static]
            inputs -= {joint.key_of[node] for node in static if node in joint.key_of}

        def standing_at(size_of: Size) -> int:
            return beside + sum(joint.bytes_of(key, size_of) for key in inputs)

        def plan_at(size_of: Size) -> StepPlan:
            at = joint if size_of is joint.size else replace(joint, size=size_of)
            rest = standing_at(size_of), self.options, self.codecs, self.tiers
            before = self._report.planned
            return share_of_largest(lambda budget: plan_graph(at, budget, *rest), self.budget, before)

        if self._trial is not None and not any(partitioning.free_sizes(joint.module)):
            halves = self._trial.cut(joint, standing_at(joint.size), self.options)
            if halves is not None:
                return halves
        report = self._report
        planned = plan_range(joint, self.budget, plan_at, standing_at, report.held)
        report.planned.append(planned.plan)
        report.graphs[planned.plan.graph] = planned.graph
        return planned.chosen[0].halves

    def uuid(self) -> str:
        """What the cut follows from, beside the graph."""
        standing = None if self._standing is None else self._standing()
        facts = [
            own_facts(),
            str(self.budget),
            torch.get_num_threads(),
            self.codecs,
            [astuple(tier) for tier in self.tiers],
            standing,
            self._available(standing or 0),
        ]
        options = [self.wishes, *sorted((self.options or {}).items())]
        return hashlib.sha256(json.dumps([*facts, options], default=str).encode()).hexdigest()

    def _available(self, standing: int) -> int | None:
        """What ``"auto"`` finds, to a twentieth: free memory is never the same twice."""
        if budgets.asks_for(self.budget) != "auto":
            return None
        device = torch.accelerator.current_accelerator() or "cpu"
        return int(math.log(budgets.available_bytes(device, standing) or 1, 1.05))
