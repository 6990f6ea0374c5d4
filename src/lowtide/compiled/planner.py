"""A plan for one joint graph within a budget, against what the backend will really allocate.

The planner's simulator knows calls; a backend fuses them, reuses buffers and has an order of its own. So each
plan is carried out, what it takes is predicted exactly from the two graphs, and where that is not within the
budget the planner is asked again, with as many bytes less as it was off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from lowtide import budget as budgets
from lowtide.budget import ACTIVATIONS, STANDING, with_slack
from lowtide.compiled.costs import Cost, costs_of
from lowtide.compiled.cut import cut
from lowtide.compiled.generated import profile_generated
from lowtide.compiled.joint import Joint
from lowtide.compiled.liveness import Profile, profile
from lowtide.compiled.steps import Outside, StepBuilder
from lowtide.errors import BudgetError
from lowtide.plan import make
from lowtide.plan.data import Plan
from lowtide.private import inductor, partitioning
from lowtide.run.limit.margins import within

ROUNDS = 5
"""Plans for one budget, each corrected by what the one before would really take."""

NEAR = 0.97
"""Share of a binding budget from which a plan uses it well."""

Predict = Callable[[fx.GraphModule, fx.GraphModule], tuple[Profile, Profile]]


@dataclass(frozen=True)
class Planned:
    """A joint graph cut in two.

    Attributes:
        forward, backward: the halves.
        plan: what is stored and what runs again; its peak is `peak_bytes`.
        peak_bytes: the most live bytes in forward or backward, with what stands beside them.
        plain_peak_bytes: the same as `torch.compile` would cut the graph by itself.
        limit_bytes: the budget.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan
    peak_bytes: int
    plain_peak_bytes: int
    limit_bytes: int


def predict_calls(joint: Joint, costs: list[Cost]) -> Predict:
    """Predict graphs that run call by call."""
    lent = _lent(joint)
    scratch = {call.node.name: cost.scratch_bytes for call, cost in zip(joint.calls, costs, strict=True)}

    def predict(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[Profile, Profile]:
        def of(node: fx.Node) -> int:
            return scratch.get(node.name, 0)

        return profile(forward, lent, of), profile(backward, lent, of)

    return predict


def predict_generated(joint: Joint, options: dict[str, object]) -> Predict:
    """Predict graphs that Inductor generates code for."""
    lent = _lent(joint)

    def predict(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[Profile, Profile]:
        text, strides = inductor.generated(forward, False, options)
        first = profile_generated(text, forward, lent)
        text, _ = inductor.generated(backward, True, options, strides)
        return first, profile_generated(text, backward, lent)

    return predict


def _lent(joint: Joint) -> set[str]:
    return {node.name for node in joint.primals}


def plan_graph(
    joint: Joint, budget: str | int, standing_bytes: int, options: dict[str, object] | None
) -> Planned:
    """Cut a joint graph so that forward and backward stay within a budget, at the least extra time.

    Args:
        joint: the graph.
        budget: as of `lowtide.limit_memory`.
        standing_bytes: what stands beside what the graph allocates: parameters, gradients, optimizer, inputs.
        options: Inductor's settings; ``None`` where graphs run call by call.

    Raises:
        BudgetError: no plan is found that fits.
    """
    costs = costs_of([joint])
    device = str(next((v.device for n in joint.primals if hasattr(v := n.meta["val"], "device")), "cpu"))
    # autograd makes zeros for outputs without a gradient: all tangents stand when backward begins
    tangents = sum(joint.bytes[key] for key in {joint.key_of.get(node) for node in joint.tangents} if key)
    outside = Outside((standing_bytes,), (standing_bytes + tangents,))
    step = StepBuilder([joint], costs, outside, device).build()
    predict = predict_calls(joint, costs[0]) if options is None else predict_generated(joint, options)

    def peak_of(halves: tuple[fx.GraphModule, fx.GraphModule]) -> int:
        return standing_bytes + max(part.peak_bytes for part in predict(*halves))

    plain = partitioning.min_cut(joint.module, joint.forward_outputs, joint.static)
    plain_peak = peak_of(plain)
    tried: dict[int, tuple[Plan, tuple[fx.GraphModule, fx.GraphModule], int]] = {}

    def attempt(target: int | None) -> tuple[Plan, tuple[fx.GraphModule, fx.GraphModule], int]:
        try:
            plan = make(step.graph, None if target is None else max(1, target), progress=False)
        except BudgetError as error:
            if error.smallest_bytes is None:
                raise
            plan = make(step.graph, error.smallest_bytes, progress=False)
        key = hash(plan.stored)
        if key not in tried:
            halves = cut(joint, step.stored(plan.stored, 0))
            tried[key] = plan, halves, peak_of(halves)
        return tried[key]

    limit = budgets.resolve(
        budget, plain_peak, lambda: with_slack(attempt(1)[2]), device, standing_bytes=standing_bytes
    )
    if plain_peak <= limit:
        plan = make(step.graph, policy="keep_all", progress=False)
        return Planned(*plain, _told(plan, limit, plain_peak, plain_peak), plain_peak, plain_peak, limit)
    room = within(limit)  # the loss and other scalars outside the graph
    target, best = room, None
    for _ in range(ROUNDS):
        found = plan, _, peak = attempt(target)
        if peak <= room and (best is None or plan.predicted_extra_seconds < best[0].predicted_extra_seconds):
            best = found
        if NEAR * limit <= peak <= room:
            break
        following = room - (peak - plan.predicted_peak_bytes)
        if following == target or (peak <= room and following < target):
            break
        target = following
    if best is None:
        found = attempt(1)
        best = found if found[2] <= room else None
    if best is None:
        smallest = with_slack(min(peak for _, _, peak in tried.values())) + 1
        raise budgets.too_small(
            limit,
            smallest,
            {STANDING: standing_bytes, ACTIVATIONS: smallest - standing_bytes},
            plain_peak_bytes=plain_peak,
        )
    plan, halves, peak = best
    return Planned(*halves, _told(plan, limit, peak, plain_peak), peak, plain_peak, limit)


def _told(plan: Plan, limit: int, peak: int, plain_peak: int) -> Plan:
    """The plan with what the backend will really take."""
    return replace(
        plan,
        budget_bytes=limit,
        predicted_peak_bytes=peak,
        plain_peak_bytes=plain_peak,
        bound_peak_bytes=min(plan.bound_peak_bytes, peak),
    )
