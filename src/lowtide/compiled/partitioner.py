"""The object that AOTAutograd calls with a joint graph: it plans, and returns forward and backward."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lowtide.compiled.joint import Joint
from lowtide.compiled.planner import Planned, plan_graph
from lowtide.private import inductor, partitioning


@dataclass
class Report:
    """What was planned so far; who asked for it reads it, compiled code does not hold it."""

    planned: list[Planned] = field(default_factory=list)


class Partitioner(inductor.CustomPartitionerFn):
    """Cuts each joint graph within a budget.

    It is immutable and can be pickled: Inductor puts a copy of it into the key of its cache, so another
    budget, version or machine compiles anew.

    Args:
        budget: as of `lowtide.limit_memory`.
        standing: bytes that stand beside a graph, where that is more than its own inputs.
        options: Inductor's settings; ``None`` where graphs run call by call.
        report: takes down what was planned, in this process alone.
    """

    def __init__(
        self,
        budget: str | int,
        standing: Callable[[], int] | None = None,
        options: dict[str, Any] | None = None,
        report: Report | None = None,
    ) -> None:
        self.budget = budget
        self.options = options
        self._standing = standing
        self._report = report

    def __getstate__(self) -> dict[str, Any]:
        return {"budget": self.budget, "options": self.options, "_standing": None, "_report": None}

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
        joint = Joint(
            gm, num_fwd_outputs, static, None if self.options is None else partitioning.default_fusible()
        )
        if not any(call.forward for call in joint.calls) or not joint.tangents:
            return partitioning.min_cut(gm, num_fwd_outputs, static)
        inputs = {joint.key_of[node]: 0 for node in joint.primals if node in joint.key_of}
        standing = sum(joint.bytes[key] for key in inputs)
        if self._standing is not None:
            parameters = {
                joint.key_of[joint.primals[at]] for at in static if joint.primals[at] in joint.key_of
            }
            standing = self._standing() + sum(joint.bytes[key] for key in inputs if key not in parameters)
        planned = plan_graph(joint, self.budget, standing, self.options)
        if self._report is not None:
            self._report.planned.append(planned)
        return planned.forward, planned.backward

    def uuid(self) -> str:
        """What the cut follows from, beside the graph."""
        import lowtide

        facts = [lowtide.__version__, torch.__version__, str(self.budget), torch.get_num_threads()]
        if self._standing is not None:
            facts.append(self._standing())
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
