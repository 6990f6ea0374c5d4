"""The object that AOTAutograd calls with a joint graph: it plans, and returns forward and backward."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import fx

from lowtide import budget as budgets
from lowtide.compiled.costs import Size
from lowtide.compiled.dynamic import Ranges, plan_range
from lowtide.compiled.joint import Joint
from lowtide.compiled.planner import Known, Planned, plan_graph
from lowtide.compiled.stored import ANY, Sizes, own_facts
from lowtide.errors import PlanError
from lowtide.plan.data import Offload
from lowtide.private import inductor, partitioning


@dataclass
class Report:
    """What was planned so far; who asked for it reads it, compiled code does not hold it.

    Attributes:
        planned: of each graph.
        ranges: of sizes that vary.
        fresh: what was planned since `take_fresh`, and the sizes that it serves.
    """

    planned: list[Known] = field(default_factory=list)
    ranges: Ranges = field(default_factory=Ranges)
    fresh: list[tuple[Known, Sizes]] = field(default_factory=list)

    def note(self, planned: Planned, sizes: Sizes) -> None:
        """Take down what is known of a graph, not the graph."""
        known = Known(planned.plan, planned.peak_bytes, planned.plain_peak_bytes, planned.limit_bytes)
        self.planned.append(known)
        self.fresh.append((known, sizes))

    def take_fresh(self) -> tuple[list[Known], Sizes]:
        """What was planned since the last call, and the sizes that all of it serves."""
        taken, self.fresh = self.fresh, []
        return [known for known, _ in taken], functools.reduce(operator.and_, (s for _, s in taken), ANY)


def refuse_old_torch() -> None:
    """Refuse a PyTorch that the compiled engine cannot work with.

    Raises:
        PlanError: this is one.
    """
    if not inductor.has_all():
        raise PlanError(
            f"a budget for compiled code needs PyTorch 2.12 or newer, and this is {torch.__version__}: "
            "update PyTorch, or leave torch.compile out and call lowtide.limit_memory(model, budget), which "
            "runs here"
        )


class Partitioner(inductor.CustomPartitionerFn):
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

    Raises:
        PlanError: this PyTorch is too old.
    """

    def __init__(
        self,
        budget: str | int,
        standing: Callable[[], int] | None = None,
        options: dict[str, Any] | None = None,
        report: Report | None = None,
        codecs: tuple[str, ...] = (),
        tiers: tuple[Offload, ...] = (),
    ) -> None:
        refuse_old_torch()
        self.codecs, self.tiers = codecs, tiers
        self.budget = budget
        self.options = options
        self.wishes = ""
        self._standing = standing
        self._report = Report() if report is None else report

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_standing": None, "_report": Report()}

    def wishing(self, wishes: str) -> Partitioner:
        """The same for a graph in which the user has marked regions."""
        other = copy.copy(self)
        other.wishes, other._standing, other._report = wishes, self._standing, self._report
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        return self

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = tuple(static_lifetime_input_indices or ())
        partitioning.clean_joint(gm)
        fusible = None if self.options is None else partitioning.default_fusible()
        joint = Joint(gm, num_fwd_outputs, static, fusible)
        if not any(call.forward for call in joint.calls) or not joint.tangents:
            return partitioning.min_cut(gm, num_fwd_outputs, static)
        if self.tiers and any(partitioning.free_sizes(gm)):
            raise PlanError(
                "tiers are for graphs of fixed sizes, and this one leaves some open: leave out mark_dynamic "
                "(and what makes sizes follow from data), or tiers"
            )
        beside = 0 if self._standing is None else self._standing()
        inputs = {joint.key_of[node] for node in joint.primals if node in joint.key_of}
        if self._standing is not None:  # parameters stand there already
            inputs -= {joint.key_of[joint.primals[at]] for at in static if joint.primals[at] in joint.key_of}

        def standing_at(size_of: Size) -> int:
            return beside + sum(joint.bytes_of(key, size_of) for key in inputs)

        def plan_at(size_of: Size) -> Planned:
            at = joint if size_of is joint.size else Joint(gm, num_fwd_outputs, static, fusible, size_of)
            return plan_graph(at, self.budget, standing_at(size_of), self.options, self.codecs, self.tiers)

        planned, sizes = plan_range(gm, self.budget, plan_at, standing_at, self._report.ranges)
        self._report.note(planned, sizes)
        return planned.forward, planned.backward

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
