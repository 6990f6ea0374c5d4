"""Plan a step of compiled graphs within one budget, by what their backend will really allocate.

All graphs of a step are written down as one `StepGraph`, which the planner decides about. What it would store
in each call is a way to cut that call's graph (`lowtide.compiled.variants`). The planner's simulator knows
calls; a backend fuses them, reuses buffers and has an order of its own. So what each cut takes is predicted
from its two graphs, and a program in whole numbers, which knows what each takes at every moment of the step,
picks one for each call: the least seconds within the budget, and few different ones of a graph that is called
often. Where the planner's own choice takes too much or leaves much, it is asked again, for as many bytes less
or more as it was off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowtide import budget as budgets
from lowtide.budget import with_slack
from lowtide.compiled.correction import NEAR, ROUNDS, Correction, at_or_smallest
from lowtide.compiled.joint import Joint, Key
from lowtide.compiled.recording import Moment, Timeline
from lowtide.compiled.steps import Step, step_of
from lowtide.compiled.variants import Menu, Variant
from lowtide.graph import StepGraph
from lowtide.plan import make, policies
from lowtide.plan.bound.program import Program
from lowtide.plan.bound.relaxation import Bound
from lowtide.plan.data import Offload, Plan, decision_of
from lowtide.plan.data.table import ModuleRow
from lowtide.plan.moves.placements import missing_links
from lowtide.plan.policies import make_plan
from lowtide.plan.simulate import Simulator
from lowtide.plan.simulate.holders import at_peak, holders_at_peak, parts_of
from lowtide.remedies import ACTIVATIONS, GRADIENTS, LOSS, OUTPUTS, STANDING
from lowtide.trace.costs.roofline import outside_modes

FIRST = 0.985
"""Share of the budget that is asked for first under Inductor, which mostly takes up to 1 % more than single
calls: the first plan is good in most cases, and each costs two lowerings.
"""

ABOVE_LEAST = (1.01, 1.03)
"""Of the smallest peak that the planner finds, what is asked for under Inductor, too: what is allocated does
not rise with that. The smallest budget became 0.5 % less for a T5 by the first, 6 % on blocks of width 32 by
the second, and the same on others.
"""

MOST_VARIANTS = 3
"""Ways to cut one graph in one step: each is compiled."""

WORTH = 1e-3
"""Share of a step that another way to cut a graph has to save to be compiled."""

MOST_NODES = 2000
"""Of branch and bound."""


@dataclass(frozen=True)
class StepPlan:
    """How each call of a step is cut.

    Attributes:
        chosen: a variant for each call.
        plain: those of `torch.compile` itself.
        plan: the same for the planner's graph of the whole step, with what the step really takes.
        graph: that graph.
    """

    chosen: tuple[Variant, ...]
    plain: tuple[Variant, ...]
    plan: Plan
    graph: StepGraph


def plan_graph(
    joint: Joint,
    budget: str | int,
    standing_bytes: int,
    options: dict[str, object] | None,
    codecs: tuple[str, ...] = (),
    tiers: tuple[Offload, ...] = (),
) -> StepPlan:
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
    menu = Menu(joint, options, standing_bytes, budget)
    policy: Any = "optimal"
    if ways := tuple(map(decision_of, (*codecs, *tiers))):
        with outside_modes():  # AOTAutograd calls us among fake tensors
            links = missing_links(ways, None, (), menu.device)
        policy = policies.mixed(*ways, links=links, slab=False)
    return _Planning(menu.timeline, [menu], menu.step, policy).plan(budget)


def plan_step(timeline: Timeline, menus: Sequence[Menu], budget: str | int) -> StepPlan:
    """Decide about every call of a recorded step.

    Args:
        timeline: the step.
        menus: ways to cut each call's graph.
        budget: as of `lowtide.limit_memory`.

    Raises:
        BudgetError: no plan is found that fits.
    """
    for menu in dict.fromkeys(one for one in menus if menus.count(one) > 1):
        menu.look()  # layers that share a graph are cut in few ways, so these are mixed
    joints, costs = [menu.joint for menu in menus], [menu.costs for menu in menus]
    step = step_of(joints, costs, timeline)
    return _Planning(timeline, menus, step).plan(budget)


def as_before(found: StepPlan, timeline: Timeline, menus: Sequence[Menu]) -> StepPlan | None:
    """The cuts of a plan where other bytes stand, with what they take there; nothing where that is above the
    budget.

    Args:
        found: the plan of the step.
        timeline: the step, with other bytes at its moments.
        menus: ways to cut each call's graph.
    """
    planning = _Planning(timeline, menus, Step(found.graph))
    peak, plain_peak = planning.peak(found.chosen), planning.peak(found.plain)
    if found.plan.budget_bytes is None or peak > found.plan.budget_bytes:
        return None
    plan = replace(found.plan, predicted_peak_bytes=peak, plain_peak_bytes=plain_peak)
    return replace(found, plan=plan)


class _Planning:
    def __init__(
        self, timeline: Timeline, menus: Sequence[Menu], step: Step, policy: Any = "optimal"
    ) -> None:
        self.timeline, self.menus, self.step, self.policy = timeline, menus, step, policy
        self.fused = any(menu.options is not None for menu in menus)
        self.tried: dict[tuple[Variant, ...], Plan] = {}

    def _peaks(self, chosen: Sequence[Variant]) -> list[int]:
        """The most live bytes at each moment when each call is cut as chosen."""
        calls, found = self.timeline.calls, []
        for moment in self.timeline.moments:
            lent = moment.lent_beside((calls[n], chosen[n].kept) for n in moment.waiting)
            takes = (self._bytes(moment, number, chosen[number], lent) for number in moment.calls)
            found.append(moment.bytes + sum(takes))
        return found

    def peak(self, chosen: Sequence[Variant]) -> int:
        """The most live bytes at any moment when each call is cut as chosen."""
        return max(self._peaks(chosen))

    def _bytes(self, moment: Moment, number: int, variant: Variant, lent: frozenset[Key] | None) -> int:
        """What a call takes at a moment: while it runs, or while its backward is to come.

        Args:
            moment: at which.
            number: the call's.
            variant: its cut.
            lent: what others hold to its end of what a backward is handed.
        """
        call = self.timeline.calls[number]
        if number != moment.call:
            return moment.held(call, variant.kept) + variant.copied
        if moment.kind == "forward":
            return variant.forward_bytes
        return variant.backward_bytes(lent)

    def plan(self, budget: str | int) -> StepPlan:
        """Within a budget."""
        timeline = self.timeline
        plain = tuple(menu.variant(None) for menu in self.menus)
        plain_peak = self.peak(plain)
        limit = budgets.resolve(
            budget, plain_peak, self._smallest, timeline.device, standing_bytes=timeline.standing_bytes
        )
        if plain_peak <= limit:
            plan = make(self.step.graph, policy="keep_all", progress=False)
            return self._told(plain, plain, plan, limit, plain_peak)
        room = limit - budgets.slack_bytes(limit)
        correction, target, bound = Correction(room), int(FIRST * room) if self.fused else room, None
        best = self._chosen(room) if self.tried else None
        for _ in range(ROUNDS):
            if target is None or (best is not None and self.peak(best) >= NEAR * limit):
                break
            plan, meant = self._meant(target)
            bound = bound or Bound(plan.bound_extra_seconds, plan.bound_peak_bytes)
            best = self._chosen(room) or best
            target = correction.following(target, plan.predicted_peak_bytes, self.peak(meant))
        if best is None:
            smallest = with_slack(self._smallest()) + 1
            best = self._chosen(room)
            if best is None:
                raise self._refused(limit, smallest, plain_peak)
        plan = self.tried.get(best)
        if plan is None:
            values = {value for (n, key), value in self.step.value_of.items() if key in best[n].kept}
            plan = make_plan(self.step.graph, stored=values, policy="optimal", bound=bound)
        return self._told(best, plain, plan, limit, plain_peak)

    def _refused(self, limit: int, smallest: int, plain_peak: int) -> Exception:
        standing, zeros = self.timeline.standing_bytes, 0
        if self.menus[0].standing_bytes is not None:
            least = self._chosen(None)
            assert least is not None
            zeros = self.menus[0].zeros_bytes(least[0])
        plan = min(self.tried.values(), key=lambda one: one.predicted_peak_bytes)
        sim = Simulator(self.step.graph).moving(plan.moves, plan.window_bytes, slab=plan.slab_bytes > 0)
        simulation = sim.simulate(plan.stored)
        found, shares = parts_of(sim, simulation), {STANDING: standing, OUTPUTS: zeros}
        for name in (GRADIENTS, LOSS):  # a backend may take less than single calls
            shares[name] = max(0, min(found.get(name, 0), smallest - sum(shares.values())))
        shares[ACTIVATIONS] = smallest - sum(shares.values())
        return budgets.too_small(
            limit,
            smallest,
            {name: count for name, count in shares.items() if count},
            plain_peak_bytes=plain_peak,
            detail=f"At its peak stands {at_peak(simulation)}.",
            made=holders_at_peak(sim, simulation),
        )

    def _meant(self, target: int) -> tuple[Plan, tuple[Variant, ...]]:
        """A plan of the step for so many bytes, or the smallest, and what it means for each call."""
        plan = at_or_smallest(self.step.graph, target, self.policy)
        meant = tuple(menu.of(plan, self.step, n) for n, menu in enumerate(self.menus))
        self.tried.setdefault(meant, plan)
        return plan, meant

    def _smallest(self) -> int:
        """The smallest peak that is found."""
        for menu in dict.fromkeys(self.menus) if self.menus[0].standing_bytes is None else ():
            menu.look()
        plan, _ = self._meant(1)
        for more in ABOVE_LEAST if self.fused else ():
            self._meant(int(more * plan.predicted_peak_bytes))
        found = self._chosen(None)
        assert found is not None
        return self.peak(found)

    def _told(
        self,
        chosen: tuple[Variant, ...],
        plain: tuple[Variant, ...],
        plan: Plan,
        limit: int,
        plain_peak: int,
    ) -> StepPlan:
        seconds, plain_seconds = (sum(one.seconds for one in cuts) for cuts in (chosen, plain))
        plan = told(plan, limit, self.peak(chosen), plain_peak, seconds, plain_seconds)
        return StepPlan(chosen, plain, plan, self.step.graph)

    def _chosen(self, room: int | None) -> tuple[Variant, ...] | None:
        """A variant for each call, of those that its menu knows: the least seconds within ``room`` bytes at
        every moment, or with ``None`` the smallest peak; nothing where none fits.
        """
        moments, program = self.timeline.moments, Program()
        step_seconds = sum(menu.variant(None).seconds for menu in self.menus) or 1.0
        unit = max(*(moment.bytes for moment in moments), 1)
        # where there is no limit the peak comes before the seconds
        weight, most = (1e3, math.inf) if room is None else (0.0, room / unit)
        peak = program.column(weight, most)
        used: dict[int, dict[int, int]] = {}  # menu -> variant -> whether any call is cut so
        ways: list[list[tuple[Variant, int]]] = []  # of each call
        for menu in self.menus:
            if id(menu) not in used:
                used[id(menu)] = {id(one): program.column(WORTH) for one in menu.known}
                program.row([(column, 1.0) for column in used[id(menu)].values()], MOST_VARIANTS)
            least = min(one.seconds for one in menu.known)
            ways.append([(one, program.column((one.seconds - least) / step_seconds)) for one in menu.known])
            program.row([(column, -1.0) for _, column in ways[-1]], -1.0)
            for one, column in ways[-1]:
                program.row([(column, 1.0), (used[id(menu)][id(one)], -1.0)], 0.0)
        for moment in moments:
            takes = [
                (column, self._bytes(moment, number, one, moment.lent) / unit)
                for number in moment.calls
                for one, column in ways[number]
            ]
            program.row([(peak, -1.0), *takes], -moment.bytes / unit)
        whole = [column for column in range(len(program.cost)) if column != peak]
        _, _, point = program.solve(whole, nodes=MOST_NODES, gap=1e-3)
        if point is None:
            return None
        chosen = tuple(
            max((point[column], n, one) for n, (one, column) in enumerate(each))[2] for each in ways
        )
        return chosen if room is None or self.peak(chosen) <= room else None


def told(plan: Plan, limit: int, peak: int, plain_peak: int, seconds: float, plain_seconds: float) -> Plan:
    """The plan with what its cuts take, and those of `torch.compile`, in place of what the planner predicted.

    Its distance from the bound stays the planner's. What each module adds is scaled to the extra time.
    """
    extra = seconds - plain_seconds
    alone = sum(row.extra_seconds for row in plan.modules)
    if alone:
        modules = [replace(row, extra_seconds=row.extra_seconds * extra / alone) for row in plan.modules]
    else:  # nothing runs again, and still the cut is another one
        modules = [*plan.modules, *([ModuleRow("", 0, 0, 0, extra)] if extra else [])]
    return replace(
        plan,
        budget_bytes=limit,
        modules=tuple(modules),
        predicted_peak_bytes=peak,
        plain_peak_bytes=plain_peak,
        bound_peak_bytes=min(plan.bound_peak_bytes, peak),
        plain_seconds=plain_seconds,
        predicted_extra_seconds=extra,
        bound_extra_seconds=extra - plan.gap_seconds,
    )
