"""A plan for one joint graph within a budget, against what the backend will really allocate.

The planner's simulator knows calls; a backend fuses them, reuses buffers and has an order of its own. So each
plan is carried out, what it takes is predicted exactly from the two graphs, and where that is not within the
budget the planner is asked again, with as many bytes less as it was off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from lowtide import budget as budgets
from lowtide.budget import ACTIVATIONS, OUTPUTS, STANDING, with_slack
from lowtide.compiled.coding import codecs_of, coded, scratch_bytes
from lowtide.compiled.correction import NEAR, ROUNDS, Correction, at_or_smallest
from lowtide.compiled.costs import Cost, Size, costs_of, surplus_of
from lowtide.compiled.cut import cut
from lowtide.compiled.generated import profile_generated
from lowtide.compiled.joint import Call, Joint, described
from lowtide.compiled.liveness import Profile, profile
from lowtide.compiled.moving import moved, tiers_of
from lowtide.compiled.scratch import Bench, Scratch
from lowtide.compiled.seconds import half_seconds, likely_traffic, parts_of, with_forecast
from lowtide.compiled.steps import Outside, StepBuilder
from lowtide.plan import make, policies
from lowtide.plan.data import Offload, Plan, decision_of
from lowtide.plan.moves.placements import missing_links
from lowtide.private import inductor, partitioning
from lowtide.trace.costs.roofline import outside_modes

ABOVE_LEAST = (1.01, 1.03)
"""Targets, as parts of the smallest that the search finds, that are tried for the smallest budget, too: what
is really allocated does not rise with them.
"""

FIRST = 0.985
"""Share of the budget that is asked for first under Inductor, which mostly takes up to 1 % more than single
calls: the first plan is good in most cases, and each costs two lowerings.
"""

Profiles = Callable[[Size], tuple[Profile, Profile]]
"""What two halves do to memory, for sizes as numbers."""

Predict = Callable[[fx.GraphModule, fx.GraphModule], Profiles]


Halves = tuple[fx.GraphModule, fx.GraphModule]


class Task:
    """A joint graph that is to be cut.

    Args:
        joint: the graph.
        standing_bytes: what stands beside what the graph allocates: parameters, gradients, optimizer, inputs.

    Attributes:
        costs: of the graph's calls.
        parts: names of nodes -> what they take, of a fused one without its traffic.
        device: of its first tensor.
        tangents: bytes of the gradients that backward is given.
        step: for the planner.
    """

    def __init__(self, joint: Joint, standing_bytes: int) -> None:
        self.joint, self.standing_bytes = joint, standing_bytes
        (self.costs,) = costs_of([joint])
        self.parts = parts_of(self.costs)
        values = (node.meta["val"] for node in joint.primals)
        self.device = str(next((value.device for value in values if hasattr(value, "device")), "cpu"))
        # autograd makes zeros for outputs without a gradient: all tangents stand when backward begins
        self.tangents = [
            joint.bytes[key] for key in {joint.key_of.get(node) for node in joint.tangents} if key
        ]
        outside = Outside((standing_bytes,), (standing_bytes + sum(self.tangents),))
        self.step = StepBuilder([joint], [self.costs], outside, self.device).build()

    def seconds(self, halves: Halves, profiles: Iterable[Profile] | None = None) -> float:
        """Time of two halves; without ``profiles`` by what their kernels are likely to be given, to be
        compared with other halves of the graph.
        """
        traffic = (
            [likely_traffic(self.joint, half) for half in halves]
            if profiles is None
            else [profile.traffic for profile in profiles]
        )
        both = zip(halves, traffic, strict=True)
        return sum(half_seconds(half, moved, self.parts, self.device) for half, moved in both)

    def plain(self) -> Halves:
        """The halves as `torch.compile` cuts them by itself."""
        return partitioning.min_cut(self.joint.module, self.joint.forward_outputs, self.joint.static)


@dataclass(frozen=True)
class Planned:
    """A joint graph cut in two.

    Attributes:
        plan: what is stored and what runs again, and the most live bytes in forward or backward.
        limit_bytes: the budget.
        forward, backward: the halves.
        made_at, plain_at: what the halves allocate at most, and those of `torch.compile` itself, with other
            sizes.
    """

    plan: Plan
    limit_bytes: int
    forward: fx.GraphModule
    backward: fx.GraphModule
    made_at: Callable[[Size], int]
    plain_at: Callable[[Size], int]


def predict_calls(joint: Joint, costs: list[Cost]) -> Predict:
    """Predict graphs that run call by call."""
    lent = lent_to(joint)
    costed = {call.node.name: (call, cost) for call, cost in zip(joint.calls, costs, strict=True)}
    maker = {key: call for call in joint.calls for key in call.writes}
    returned = {joint.key_of.get(node) for node in joint.outputs[0] if isinstance(node, fx.Node)}

    def predict(forward: fx.GraphModule, backward: fx.GraphModule) -> Profiles:
        handed = {node.name for node in backward.graph.nodes}

        def profiles(size_of: Size) -> tuple[Profile, Profile]:
            def at(count: int, call: Call) -> int:
                if size_of is joint.size:
                    return count
                here, there = joint.bytes_at(call, joint.size), joint.bytes_at(call, size_of)
                return -(-count * there // here) if here else count

            def scratch(node: fx.Node) -> int:
                if node.name not in costed:
                    return scratch_bytes(node.target, described(node)[0])
                call, cost = costed[node.name]
                return at(cost.scratch_bytes, call)

            surplus = {key: at(count, maker[key]) for key, count in surplus_of(joint, costs).items()}
            loss = sum(count for key, count in surplus.items() if key in returned and key not in handed)
            first = profile(forward, lent, scratch, size_of, surplus)
            second = profile(backward, lent, scratch, size_of, surplus)
            return first, replace(second, peak_bytes=second.peak_bytes + loss)

        return profiles

    return predict


def predict_generated(joint: Joint, options: dict[str, object]) -> Predict:
    """Predict graphs that Inductor generates code for."""
    lent, bench = lent_to(joint), Bench()

    def predict(forward: fx.GraphModule, backward: fx.GraphModule) -> Profiles:
        first, strides = inductor.generated(forward, False, options)
        donated = inductor.donated_inputs(forward, backward, joint.forward_outputs)
        second, _ = inductor.generated(backward, True, options, strides, donated)
        scratch = Scratch(bench), Scratch(bench)

        def profiles(size_of: Size) -> tuple[Profile, Profile]:
            one = profile_generated(first, forward, lent, scratch[0].run(), size_of)
            held = lent - one.copied.keys()
            return one, profile_generated(second, backward, held, scratch[1].run(), size_of, strides)

        return profiles

    return predict


def lent_to(joint: Joint) -> set[str]:
    """Names of what the halves are given and others hold."""
    return {node.name for node in joint.primals}


def plan_graph(
    joint: Joint,
    budget: str | int,
    standing_bytes: int,
    options: dict[str, object] | None,
    codecs: tuple[str, ...] = (),
    tiers: tuple[Offload, ...] = (),
) -> Planned:
    """Cut a joint graph so that forward and backward stay within a budget, at the least extra time.

    Args:
        joint: the graph.
        budget: as of `lowtide.limit_memory`.
        standing_bytes: what stands beside what the graph allocates: parameters, gradients, optimizer, inputs.
        options: Inductor's settings; ``None`` where graphs run call by call.
        codecs: in which saved values may wait in fewer bytes.
        tiers: where saved values may wait.

    Raises:
        BudgetError: no plan is found that fits.
    """
    task = Task(joint, standing_bytes)
    step, device, tangents = task.step, task.device, task.tangents
    predict = predict_calls(joint, task.costs) if options is None else predict_generated(joint, options)

    made: dict[fx.GraphModule, Profiles] = {}

    def predicted(halves: Halves) -> tuple[int, float]:
        """Peak and seconds."""
        made[halves[0]] = profiles = predict(*halves)
        both = profiles(joint.size)
        return standing_bytes + max(one.peak_bytes for one in both), task.seconds(halves, both)

    plain = task.plain()
    plain_peak, plain_seconds = predicted(plain)
    plain_at = _most(made[plain[0]])
    policy: Any = "optimal"
    ways = tuple(map(decision_of, (*codecs, *tiers)))
    if ways:
        with outside_modes():  # AOTAutograd calls us among fake tensors
            links = missing_links(ways, None, (), device)
        policy = policies.mixed(*ways, links=links, slab=False)
    tried: dict[int, tuple[Plan, Halves, int]] = {}

    def carried_out(plan: Plan) -> Halves:
        codes, places = codecs_of(plan), tiers_of(plan)
        halves = cut(joint, step.stored(plan.stored | codes.keys() | places.keys(), 0))
        names = {value: name for (_, name), value in step.value_of.items()}
        if codes:
            by_name = {names[value]: codec for value, codec in codes.items()}
            halves = coded(*halves, joint.forward_outputs, by_name)
        if places:
            tier_of = {names[value]: tier for value, tier in places.items()}
            halves = moved(*halves, joint.forward_outputs, tier_of, plan.window_bytes)
        return halves

    def attempt(target: int | None) -> tuple[Plan, Halves, int]:
        plan = at_or_smallest(step.graph, target, policy)
        key = hash((plan.stored, plan.window_bytes, *((move.value, move.decision) for move in plan.moves)))
        if key not in tried:
            halves = carried_out(plan)
            peak, seconds = predicted(halves)
            tried[key] = with_forecast(plan, seconds, plain_seconds), halves, peak
        return tried[key]

    def smallest() -> int:
        least = attempt(1)[0].predicted_peak_bytes
        for more in ABOVE_LEAST:
            attempt(int(more * least))
        return with_slack(min(plain_peak, *(peak for _, _, peak in tried.values())))

    limit = budgets.resolve(budget, plain_peak, smallest, device, standing_bytes=standing_bytes)
    if plain_peak <= limit:
        plan = make(step.graph, policy="keep_all", progress=False)
        plan = with_forecast(plan, plain_seconds, plain_seconds)
        known = told(plan, limit, plain_peak, plain_peak)
        return Planned(known, limit, *plain, plain_at, plain_at)
    room = limit - budgets.slack_bytes(limit)  # the loss and other scalars outside the graph

    def best_that_fits() -> tuple[Plan, Halves, int] | None:
        fitting = [one for one in tried.values() if one[2] <= room]
        return min(fitting, key=lambda one: one[0].predicted_extra_seconds, default=None)

    best = best_that_fits()
    correction, target = Correction(room), room if options is None else int(FIRST * room)
    for _ in range(ROUNDS):
        if target is None or (best is not None and best[2] >= NEAR * limit):
            break
        plan, _, peak = attempt(target)
        best = best_that_fits()
        target = correction.following(target, plan.predicted_peak_bytes, peak)
    if best is None:
        least = smallest() + 1
        best = best_that_fits()
    if best is None:
        own, zeros = least - standing_bytes, 0
        _, halves, _ = min(tried.values(), key=lambda one: one[2])
        first, second = made[halves[0]](joint.size)
        if second.peak_bytes >= first.peak_bytes:
            zeros = sum(tangents) - min(tangents, default=0)  # the least is the loss's
        shares = {STANDING: standing_bytes, OUTPUTS: zeros, ACTIVATIONS: own - zeros}
        raise budgets.too_small(limit, least, shares, plain_peak_bytes=plain_peak)
    plan, halves, peak = best
    known = told(plan, limit, peak, plain_peak)
    return Planned(known, limit, *halves, _most(made[halves[0]]), plain_at)


def _most(profiles: Profiles) -> Callable[[Size], int]:
    return lambda size_of: max(part.peak_bytes for part in profiles(size_of))


def told(plan: Plan, limit: int, peak: int, plain_peak: int) -> Plan:
    """The plan with what the backend will really take."""
    return replace(
        plan,
        budget_bytes=limit,
        predicted_peak_bytes=peak,
        plain_peak_bytes=plain_peak,
        bound_peak_bytes=min(plan.bound_peak_bytes, peak),
    )
