"""What is asked for next, when a plan really takes more or less than the planner says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
from random_graphs import random_graph

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan import Plan, make
from lowtide.plan.choose import Correction, at_or_smallest, attempts, choose

ROOM = 100_000
GRAPH = random_graph(1)
KEPT = make(GRAPH, policy="keep_all")


class Planner:
    """A policy whose plans take what they are asked for, down to the smallest; notes what that is."""

    def __init__(self, smallest: int = 1) -> None:
        self.smallest = smallest
        self.asked: list[int] = []

    def __call__(self, graph: StepGraph, budget: int | None = None) -> Plan:
        assert budget is not None
        self.asked.append(budget)
        if budget < self.smallest:
            raise BudgetError("too small", self.smallest)
        return replace(KEPT, predicted_peak_bytes=budget, predicted_extra_seconds=1 / budget)


def best(off: Callable[[int], int]) -> int:
    """The most that a plan really takes within the room, when the planner's are off by that much."""
    found = 0
    price = lambda plan: plan.predicted_peak_bytes + off(plan.predicted_peak_bytes)  # noqa: E731
    for _, took in islice(attempts(GRAPH, ROOM, price, Planner()), 6):
        found = max(found, took if took <= ROOM else 0)
        if found >= 0.97 * ROOM:
            break
    return found


@pytest.mark.parametrize(
    "off",
    [
        lambda target: 0,
        lambda target: 9_000,
        lambda target: -6_000,
        lambda target: 2_000 if target > 95_000 else 9_000,
        # more and more runs again, and each time more is live at the peak than before
        lambda target: 2_500 + 2_500 * ((100_000 - target) // 2_500) if target > 88_000 else 9_700,
        lambda target: 15_000 if target > 94_000 else 2_000,
    ],
    ids=["none", "the same", "less", "a step", "steps", "a fall"],
)
def test_a_plan_close_to_the_room_is_found(off: Callable[[int], int]) -> None:
    assert best(off) >= 0.94 * ROOM


def test_nothing_is_asked_for_twice() -> None:
    correction = Correction(ROOM)
    assert correction.next_target(ROOM, ROOM, ROOM - 10) == ROOM + 10
    assert correction.next_target(ROOM + 10, ROOM, ROOM - 10) is None, "the planner has nothing larger"
    assert Correction(100).next_target(100, 90, 300) is None, "no target is left"


def test_a_plan_that_fits_at_once_is_chosen() -> None:
    planner = Planner()
    plan = choose(GRAPH, ROOM, lambda plan: plan.predicted_peak_bytes - 9_000, policy=planner)
    assert plan.predicted_peak_bytes == ROOM and planner.asked == [ROOM]
    known = Planner()
    assert choose(GRAPH, ROOM, policy=known, first=plan) is plan and known.asked == []


def test_a_plan_that_leaves_much_is_not_the_last_that_is_tried() -> None:
    """Less was asked for than had to be: a plan in between has less extra time."""
    planner = Planner()
    waste = lambda plan: 20_000 if plan.predicted_peak_bytes > 90_000 else 2_000  # noqa: E731
    plan = choose(GRAPH, ROOM, lambda plan: plan.predicted_peak_bytes + waste(plan), policy=planner)
    assert planner.asked[:2] == [ROOM, ROOM - 20_000] and len(planner.asked) <= 8
    assert 0.8 * ROOM < plan.predicted_peak_bytes <= 90_000


def test_the_refusal_says_the_least_that_a_plan_takes() -> None:
    price = lambda plan: 2 * plan.predicted_peak_bytes  # noqa: E731
    with pytest.raises(BudgetError) as caught:
        choose(GRAPH, ROOM, price, policy=Planner(smallest=60_000))
    assert caught.value.smallest_bytes == 120_000


def test_where_the_simulated_peak_is_the_price_the_planner_refuses() -> None:
    planner = Planner(smallest=ROOM + 1)
    with pytest.raises(BudgetError, match="too small"):
        choose(GRAPH, ROOM, policy=planner)
    assert planner.asked == [ROOM], "its smallest plan is not made"
    near = Planner(smallest=ROOM - 1)
    assert choose(GRAPH, ROOM, policy=near, target=ROOM - 10).predicted_peak_bytes == ROOM - 1
    assert at_or_smallest(GRAPH, 5, Planner(smallest=7)).predicted_peak_bytes == 7
