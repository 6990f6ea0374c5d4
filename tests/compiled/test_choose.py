"""What is asked for next, when a plan really takes more or less than the planner says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lowtide.compiled.choose import NEAR, ROUNDS, Correction

ROOM = 100_000


def best(off: Callable[[int], int]) -> int:
    """The most that a plan really takes within the room, when the planner's are off by that much."""
    correction, target, found = Correction(ROOM), ROOM, 0
    for _ in range(ROUNDS):
        if target is None or found >= NEAR * ROOM:
            break
        took = target + off(target)
        found = max(found, took if took <= ROOM else 0)
        target = correction.following(target, target, took)
    return found


@pytest.mark.parametrize(
    "off",
    [
        lambda target: 0,
        lambda target: 9_000,
        lambda target: -6_000,
        lambda target: 2_000 if target > 95_000 else 9_000,
        # more and more runs again, and each time more stands at the peak than before
        lambda target: 2_500 + 2_500 * ((100_000 - target) // 2_500) if target > 88_000 else 9_700,
        lambda target: 15_000 if target > 94_000 else 2_000,
    ],
    ids=["none", "the same", "less", "a step", "steps", "a fall"],
)
def test_a_plan_close_to_the_room_is_found(off: Callable[[int], int]) -> None:
    assert best(off) >= 0.94 * ROOM


def test_nothing_is_asked_for_twice() -> None:
    correction = Correction(ROOM)
    assert correction.following(ROOM, ROOM, ROOM - 10) == ROOM + 10
    assert correction.following(ROOM + 10, ROOM, ROOM - 10) is None, "the planner has nothing larger"
    assert Correction(100).following(100, 90, 300) is None, "no target is left"
