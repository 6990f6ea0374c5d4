"""A plan for a whole step of several compiled graphs: one timeline, one budget.

All graphs of a recorded step are written down as one `StepGraph`, which the planner decides about. What it
would store in each call is a way to cut that call's graph (`lowtide.compiled.variants`); with the cut of
`torch.compile` itself these are the columns of a program in whole numbers, which knows exactly what each
takes at every moment of the step, and picks one for each call: the least seconds within the budget, and few
different ones of a graph that is called often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide import budget as budgets
from lowtide.budget import ACTIVATIONS, STANDING, with_slack
from lowtide.compiled.correction import NEAR, ROUNDS, Correction, at_or_smallest
from lowtide.compiled.recording import Moment, Recording
from lowtide.compiled.steps import Outside, Step, StepBuilder
from lowtide.compiled.variants import Menu, Variant
from lowtide.plan import make
from lowtide.plan.bound.program import Program
from lowtide.plan.bound.relaxation import Bound
from lowtide.plan.data import Plan
from lowtide.plan.policies import make_plan

SPREAD = 4
"""Ways to cut a graph that is called several times, between the least memory and the plain cut, that are
looked at beside those that plans of the whole step ask for: these differ from call to call."""

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
        plan: the same for the planner's graph of the whole step, with what the step really takes.
    """

    chosen: tuple[Variant, ...]
    plan: Plan


def plan_step(recording: Recording, menus: Sequence[Menu], budget: str | int) -> StepPlan:
    """Decide about every call of a recorded step.

    Args:
        recording: the step.
        menus: ways to cut each call's graph.
        budget: as of `lowtide.limit_memory`.

    Raises:
        BudgetError: no plan is found that fits.
    """
    return _Planning(recording, menus).plan(budget)


class _Planning:
    def __init__(self, recording: Recording, menus: Sequence[Menu]) -> None:
        self.recording, self.menus = recording, menus
        self.step = self._step()
        for menu in {id(menu): menu for menu in menus}.values():
            menu.look(SPREAD if sum(other is menu for other in menus) > 1 else 0)

    def _step(self) -> Step:
        """The step as the planner sees it."""
        joints = [menu.joint for menu in self.menus]
        costs = [menu.costs for menu in self.menus]
        first: dict[int, int] = {}
        second: dict[int, int] = {}
        order: list[tuple[str, int]] = []
        for moment in self.recording.moments:
            if moment.call is None:
                order.append(("gap", moment.bytes))
            else:
                (first if moment.kind == "forward" else second)[moment.call] = moment.bytes
                order.append((moment.kind, moment.call))
        count = range(len(self.recording.calls))
        outside = Outside(tuple(first[n] for n in count), tuple(second.get(n, first[n]) for n in count))
        return StepBuilder(joints, costs, outside, self.recording.device, order).build()

    def _peak(self, chosen: Sequence[Variant]) -> int:
        """The most live bytes at any moment when each call is cut as chosen."""
        return max(
            moment.bytes + sum(self._bytes(moment, number, chosen[number]) for number in moment.calls)
            for moment in self.recording.moments
        )

    def _bytes(self, moment: Moment, number: int, variant: Variant) -> int:
        """What a call takes at a moment: while it runs, or while its backward is to come."""
        call = self.recording.calls[number]
        if number != moment.call:
            return moment.held(call, variant.kept) + variant.copied
        if moment.kind == "forward":
            return variant.forward_bytes
        return variant.backward_bytes[moment.lent] + moment.held_by_itself(call, variant.kept)

    def plan(self, budget: str | int) -> StepPlan:
        """Within a budget."""
        recording = self.recording
        plain = [menu.variant(None) for menu in self.menus]
        plain_peak = self._peak(plain)
        limit = budgets.resolve(
            budget, plain_peak, self._smallest, recording.device, standing_bytes=recording.standing_bytes
        )
        if plain_peak <= limit:
            plan = make(self.step.graph, policy="keep_all", progress=False)
            return self._told(plain, plan, limit, plain_peak)
        room = limit - budgets.slack_bytes(limit)
        correction, target, best, bound = Correction(room), room, None, None
        for _ in range(ROUNDS):
            if target is None or (best is not None and self._peak(best) >= NEAR * limit):
                break
            plan = at_or_smallest(self.step.graph, target)
            bound = bound or Bound(plan.bound_extra_seconds, plan.bound_peak_bytes)
            meant = self._meant(plan)
            best = self._chosen(room) or best
            target = correction.following(target, plan.predicted_peak_bytes, self._peak(meant))
        if best is None:
            smallest, standing = with_slack(self._smallest()) + 1, recording.standing_bytes
            parts = {STANDING: standing, ACTIVATIONS: smallest - standing}
            raise budgets.too_small(limit, smallest, parts, plain_peak_bytes=plain_peak)
        values = {value for (number, key), value in self.step.value_of.items() if key in best[number].kept}
        assert bound is not None
        plan = make_plan(self.step.graph, stored=values, policy="optimal", bound=bound)
        extra = sum(one.seconds for one in best)
        return self._told(best, replace(plan, predicted_extra_seconds=extra), limit, plain_peak)

    def _meant(self, plan: Plan) -> list[Variant]:
        """What a plan of the whole step means for each call."""
        step, stored = self.step, plan.stored
        return [menu.variant(frozenset(step.stored(stored, n))) for n, menu in enumerate(self.menus)]

    def _smallest(self) -> int:
        """The smallest peak that is found."""
        self._meant(at_or_smallest(self.step.graph, 1))
        found = self._chosen(None)
        assert found is not None
        return self._peak(found)

    def _told(self, chosen: Sequence[Variant], plan: Plan, limit: int, plain_peak: int) -> StepPlan:
        peak = self._peak(chosen)
        plan = replace(
            plan,
            budget_bytes=limit,
            predicted_peak_bytes=peak,
            plain_peak_bytes=plain_peak,
            bound_peak_bytes=min(plan.bound_peak_bytes, peak),
            bound_extra_seconds=min(plan.bound_extra_seconds, plan.predicted_extra_seconds),
        )
        return StepPlan(tuple(chosen), plan)

    def _chosen(self, room: int | None) -> list[Variant] | None:
        """A variant for each call, of those that its menu knows: the least seconds within ``room`` bytes at
        every moment, or with ``None`` the smallest peak; nothing where none fits.
        """
        moments, program = self.recording.moments, Program()
        step_seconds = sum(cost.seconds for menu in self.menus for cost in menu.costs)
        unit = max(*(moment.bytes for moment in moments), 1)
        # where there is no limit the peak comes before the seconds
        weight, most = (max(step_seconds, 1e-3) * 1e3, math.inf) if room is None else (0.0, room / unit)
        peak = program.column(weight, most)
        used: dict[int, dict[int, int]] = {}  # menu -> variant -> whether any call is cut so
        ways: list[list[tuple[Variant, int]]] = []  # of each call
        for menu in self.menus:
            if id(menu) not in used:
                used[id(menu)] = {id(one): program.column(WORTH * step_seconds) for one in menu.known}
                program.row([(column, 1.0) for column in used[id(menu)].values()], MOST_VARIANTS)
            ways.append([(one, program.column(one.seconds)) for one in menu.known])
            program.row([(column, -1.0) for _, column in ways[-1]], -1.0)
            for one, column in ways[-1]:
                program.row([(column, 1.0), (used[id(menu)][id(one)], -1.0)], 0.0)
        for moment in moments:
            takes = [
                (column, self._bytes(moment, number, one) / unit)
                for number in moment.calls
                for one, column in ways[number]
            ]
            program.row([(peak, -1.0), *takes], -moment.bytes / unit)
        whole = [column for column in range(len(program.cost)) if column != peak]
        _, _, point = program.solve(whole, nodes=MOST_NODES, gap=1e-3)
        if point is None:
            return None
        chosen = [max((point[column], n, one) for n, (one, column) in enumerate(each))[2] for each in ways]
        return chosen if room is None or self._peak(chosen) <= room else None
