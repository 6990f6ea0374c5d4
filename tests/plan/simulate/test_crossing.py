"""Values are stored so that no replay reads a gathered storage while that is empty."""

from __future__ import annotations

from lowtide.plan.simulate.crossing import crossing

PRODUCER = [-1, 0, 1, 2]
"""Operation 0 makes value 1, operation 1 makes value 2 from it, operation 2 makes value 3 from that."""
READS = [[], [1], [2]]


def stored_after(far: set[int], sizes: list[int], storable: tuple[int, ...] = (1, 1, 1, 1)) -> list[int]:
    """What is stored when backward asks for value 3 at event 9, and operations ``far`` cannot run then."""
    stored = bytearray([1, 0, 0, 0])
    crossing([(3, 9)], lambda op, event: op not in far, stored, PRODUCER, READS, storable, sizes)
    return [value for value in range(1, 4) if stored[value]]


def test_nothing_is_stored_where_every_replay_can_run() -> None:
    assert stored_after(set(), [0, 1, 1, 1]) == []


def test_the_smallest_value_on_the_way_is_stored() -> None:
    assert stored_after({0}, [0, 8, 4, 8]) == [2]
    assert stored_after({0}, [0, 4, 8, 8]) == [1]
    assert stored_after({2}, [0, 1, 1, 8]) == [3], "what its own operation makes, if that is the far one"


def test_a_value_that_a_replay_cannot_begin_from_is_passed_over() -> None:
    assert stored_after({0}, [0, 8, 4, 8], storable=(1, 1, 0, 1)) == [1]
