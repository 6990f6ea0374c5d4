"""A plan for a whole step of several compiled graphs: one timeline, one budget.

All graphs of a recorded step are written down as one `StepGraph`, which the planner decides about. What it
would store in each call is a way to cut that call's graph (`lowtide.compiled.variants`); with the cut of
`torch.compile` itself these are the columns of a program in whole numbers, which knows exactly what each
takes at every moment of the step, and picks one for each call: the least seconds within the budget, and few
different ones of a graph that is called often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from lowtide import budget as budgets
from lowtide.budget import ACTIVATIONS, STANDING, with_slack
from lowtide.compiled.correction import NEAR, ROUNDS, Correction, at_or_smallest
from lowtide.compiled.recording import Call, Moment, Recording
from lowtide.compiled.steps import Outside, Step, StepBuilder
from lowtide.compiled.variants import Menu, Variant
from lowtide.plan import make, make_plan
from lowtide.plan.bound.relaxation import Bound
from lowtide.plan.data import Plan

SPREAD = 4
"""Ways to cut a graph that is called several times, between the least memory and the plain cut, that are
looked at beside those that plans of the whole step ask for: these differ from call to call."""

MOST_VARIANTS = 3
"""Ways to cut one graph in one step: each is compiled."""

WORTH = 1e-3
"""Share of a step that another way to cut a graph has to save to be compiled."""

SOLVER_SECONDS = 10.0


@dataclass(frozen=True)
class Timeline:
    """What is known of a step.

    Args:
        calls: of its graphs, in the order of their forwards.
        moments: in order.
        menus: of each call's graph.
    """

    calls: Sequence[Call]
    moments: Sequence[Moment]
    menus: Sequence[Menu]

    def peak(self, chosen: Sequence[Variant]) -> int:
        """The most live bytes at any moment when each call is cut as chosen."""
        return max(
            moment.bytes
            + sum(moment.held(self.calls[n], chosen[n].kept) + chosen[n].copied for n in moment.waiting)
            + self.own(moment, chosen)
            for moment in self.moments
        )

    def own(self, moment: Moment, chosen: Sequence[Variant]) -> int:
        """What the call that runs takes by itself."""
        if moment.call is None:
            return 0
        return own_bytes(moment, self.calls[moment.call], chosen[moment.call])

    def step(self) -> Step:
        """The step as the planner sees it."""
        joints = [menu.joint for menu in self.menus]
        costs = [menu.costs for menu in self.menus]
        first: dict[int, int] = {}
        second: dict[int, int] = {}
        order: list[tuple[str, int]] = []
        for moment in self.moments:
            if moment.kind == "gap":
                order.append(("gap", moment.bytes))
            elif moment.call is not None:
                (first if moment.kind == "forward" else second)[moment.call] = moment.bytes
                order.append((moment.kind, moment.call))
        count = range(len(self.calls))
        outside = Outside(tuple(first[n] for n in count), tuple(second.get(n, first[n]) for n in count))
        device = next(
            (str(v.device) for n in joints[0].primals if hasattr(v := n.meta["val"], "device")), "cpu"
        )
        return StepBuilder(joints, costs, outside, device, order).build()


def own_bytes(moment: Moment, call: Call, variant: Variant) -> int:
    """What a forward or backward takes by itself."""
    if moment.kind == "forward":
        return variant.forward_bytes
    return variant.backward_bytes[moment.lent] + moment.held_by_itself(call, variant.kept)


@dataclass(frozen=True)
class StepPlan:
    """How each call of a step is cut.

    Attributes:
        chosen: a variant for each call.
        plan: the same for the planner's graph of the whole step; its peak is `peak_bytes`.
        peak_bytes: the most live bytes in the step.
        plain_peak_bytes: the same as `torch.compile` would cut its graphs.
        limit_bytes: the budget.
    """

    chosen: tuple[Variant, ...]
    plan: Plan
    peak_bytes: int
    plain_peak_bytes: int
    limit_bytes: int


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
        self.recording = recording
        self.time = Timeline(recording.calls, recording.moments, menus)
        self.menus = list({id(menu): menu for menu in menus}.values())
        self.step = self.time.step()
        for menu in self.menus:
            menu.plain()
            menu.all()
            menu.storing(menu.smallest())
            if sum(other is menu for other in menus) > 1:
                menu.spread(SPREAD)

    def plan(self, budget: str | int) -> StepPlan:
        """Within a budget."""
        plain = [menu.plain() for menu in self.time.menus]
        plain_peak = self.time.peak(plain)
        limit = budgets.resolve(
            budget, plain_peak, self._smallest, self.recording.device,
            standing_bytes=self.recording.standing_bytes,
        )  # fmt: skip
        if plain_peak <= limit:
            plan = make(self.step.graph, policy="keep_all", progress=False)
            return self._told(plain, plan, limit, plain_peak, plain_peak)
        room = limit - budgets.slack_bytes(limit)
        correction, target, best, bound = Correction(room), room, None, None
        for _ in range(ROUNDS):
            if target is None or (best is not None and self.time.peak(best) >= NEAR * limit):
                break
            plan = at_or_smallest(self.step.graph, target)
            bound = bound or Bound(plan.bound_extra_seconds, plan.bound_peak_bytes)
            meant = self._columns(plan)
            best = self._choose(room) or best
            target = correction.following(target, plan.predicted_peak_bytes, self.time.peak(meant))
        if best is None:
            smallest = with_slack(self._smallest()) + 1
            raise budgets.too_small(
                limit,
                smallest,
                {STANDING: self.recording.standing_bytes,
                 ACTIVATIONS: smallest - self.recording.standing_bytes},
                plain_peak_bytes=plain_peak,
            )  # fmt: skip
        values = {value for (number, key), value in self.step.value_of.items() if key in best[number].kept}
        assert bound is not None
        plan = make_plan(self.step.graph, stored=values, policy="optimal", bound=bound)
        extra = sum(one.seconds for one in best)
        plan = replace(plan, predicted_extra_seconds=extra)
        return self._told(best, plan, limit, self.time.peak(best), plain_peak)

    def _columns(self, plan: Plan) -> list[Variant]:
        """What a plan of the whole step means for each call."""
        stored: dict[int, set[str]] = {}
        for (number, key), value in self.step.value_of.items():
            if value in plan.stored:
                stored.setdefault(number, set()).add(key)
        return [menu.storing(stored.get(n, ())) for n, menu in enumerate(self.time.menus)]

    def _smallest(self) -> int:
        """The smallest peak that is found."""
        self._columns(at_or_smallest(self.step.graph, 1))
        found = self._choose(None)
        assert found is not None
        return self.time.peak(found)

    def _choose(self, room: int | None) -> list[Variant] | None:
        """The least seconds within ``room``, or where that is ``None`` the smallest peak."""
        return choose(self.time, {id(menu): _pareto(menu) for menu in self.menus}, room)

    def _told(
        self, chosen: Sequence[Variant], plan: Plan, limit: int, peak: int, plain_peak: int
    ) -> StepPlan:
        plan = replace(
            plan,
            budget_bytes=limit,
            predicted_peak_bytes=peak,
            plain_peak_bytes=plain_peak,
            bound_peak_bytes=min(plan.bound_peak_bytes, peak),
            bound_extra_seconds=min(plan.bound_extra_seconds, plan.predicted_extra_seconds),
        )
        return StepPlan(tuple(chosen), plan, peak, plain_peak, limit)


def _pareto(menu: Menu) -> list[Variant]:
    """The variants of a menu that no other one is better than in everything."""
    found = list({id(one): one for one in menu.found.values()}.values())

    def facts(one: Variant) -> tuple[float, ...]:
        took = (one.forward_bytes, *one.backward_bytes.values())
        return (one.seconds, sum(one.kept.values()) + one.copied, *took)

    return [
        one
        for one in found
        if not any(
            other is not one and facts(other) != facts(one)
            and all(a <= b for a, b in zip(facts(other), facts(one), strict=True))
            for other in found
        )
    ]  # fmt: skip


def choose(time: Timeline, columns: dict[int, list[Variant]], room: int | None) -> list[Variant] | None:
    """A variant for each call: the least seconds within ``room`` bytes at every moment, or with ``None`` the
    smallest peak.

    Args:
        time: the step.
        columns: id of a menu -> what may be chosen of it.
        room: bytes.

    Returns:
        Nothing where none fits.
    """
    places: list[tuple[int, Variant]] = []
    at: dict[int, list[int]] = {}
    for number, menu in enumerate(time.menus):
        for variant in columns[id(menu)]:
            at.setdefault(number, []).append(len(places))
            places.append((number, variant))
    kinds = {(id(menu), id(one)): k for k, (menu, one) in enumerate(_kinds(time, columns))}
    first_kind, peak = len(places), len(places) + len(kinds)
    width = peak + 1
    seconds = np.zeros(width)
    step_seconds = sum(cost.seconds for menu in time.menus for cost in menu.costs)
    seconds[: len(places)] = [variant.seconds for _, variant in places]
    seconds[first_kind:peak] = WORTH * step_seconds
    if room is None:
        seconds[peak] = max(step_seconds, 1e-3) * 1e3  # the peak comes first
    unit = max(max(moment.bytes for moment in time.moments), 1)

    rows: list[dict[int, float]] = []
    lower: list[float] = []
    upper: list[float] = []

    def row(entries: dict[int, float], least: float, most: float) -> None:
        rows.append(entries)
        lower.append(least)
        upper.append(most)

    for number in at:
        row(dict.fromkeys(at[number], 1.0), 1.0, 1.0)
    for moment in time.moments:
        entries: dict[int, float] = {peak: -1.0}
        for number in moment.waiting:
            for place in at[number]:
                one = places[place][1]
                entries[place] = (moment.held(time.calls[number], one.kept) + one.copied) / unit
        if moment.call is not None:
            for place in at[moment.call]:
                own = own_bytes(moment, time.calls[moment.call], places[place][1])
                entries[place] = own / unit
        row(entries, -np.inf, -moment.bytes / unit)
    for place, (number, variant) in enumerate(places):  # what is used is compiled
        row({place: 1.0, first_kind + kinds[id(time.menus[number]), id(variant)]: -1.0}, -np.inf, 0.0)
    for menu in {id(menu): menu for menu in time.menus}.values():
        row({first_kind + k: 1.0 for (m, _), k in kinds.items() if m == id(menu)}, 0.0, MOST_VARIANTS)
    least: Any = np.array(lower)
    most: Any = np.array(upper)
    matrix = coo_array(
        (
            [value for entries in rows for value in entries.values()],
            (
                [r for r, entries in enumerate(rows) for _ in entries],
                [column for entries in rows for column in entries],
            ),
        ),
        shape=(len(rows), width),
    ).tocsr()
    none: Any = np.zeros(width)
    top: Any = np.ones(width)
    top[peak] = np.inf if room is None else room / unit
    whole = np.ones(width)
    whole[peak] = 0
    answer = milp(
        seconds,
        integrality=whole,
        bounds=Bounds(none, top),
        constraints=LinearConstraint(matrix, least, most),
        options={"time_limit": SOLVER_SECONDS, "mip_rel_gap": 1e-3},
    )
    if answer.x is None:
        return None
    chosen = [places[max(at[number], key=lambda place: answer.x[place])][1] for number in sorted(at)]
    return chosen if room is None or time.peak(chosen) <= room else None


def _kinds(time: Timeline, columns: dict[int, list[Variant]]) -> list[tuple[Menu, Variant]]:
    menus = {id(menu): menu for menu in time.menus}
    return [(menu, one) for key, menu in menus.items() for one in columns[key]]
