"""Which operations bring values back: the backward slice over producers; and why none do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from lowtide.errors import PlanError
from lowtide.plan.simulate.index import StepIndex


def replay_set(
    values: Iterable[int],
    producer: Sequence[int],
    reads: Sequence[Sequence[int]],
    there: Sequence[object],
) -> set[int]:
    """The operations that run again to bring ``values`` back; -1 is among them where that rests on something
    that nothing made.

    Args:
        values: ids of the values.
        producer: value -> the operation that makes it, or -1.
        reads: operation -> the values that it reads.
        there: value -> whether it need not be brought back where it is read.

    Example:
        Operation 0 makes value 1 from 0, operation 1 makes 2 from 1.

        >>> sorted(replay_set([2], [-1, 0, 1], [[0], [1]], [True, False, False]))
        [0, 1]
        >>> sorted(replay_set([2], [-1, 0, 1], [[0], [1]], [False, True, False]))
        [1]
    """
    found: set[int] = set()
    stack = [producer[v] for v in values]
    while stack:
        index = stack.pop()
        if index in found:
            continue
        found.add(index)
        if index >= 0:
            stack += [producer[u] for u in reads[index] if not there[u]]
    return found


def refuse(sim: StepIndex, evicted: Iterable[int], flags: bytearray) -> NoReturn:
    """Say why what is evicted cannot be brought back.

    Raises:
        PlanError: always.
    """
    evicted = list(evicted)
    needed = replay_set(evicted, sim.producer, [op.reads for op in sim.operations], flags)
    read = [u for index in sorted(needed - {-1}, reverse=True) for u in sim.operations[index].reads]
    for value in (*evicted, *(u for u in read if not flags[u])):
        index = sim.producer[value]
        if index >= 0 and not sim.operations[index].replayable:
            reason = sim.operations[index].reason or "unknown reason"
            raise PlanError(
                f"value {value} must be stored: {sim.describe(value)} is not replayable ({reason})"
            )
    lost = next(u for u in (*read, *evicted) if flags[u] == 2 or (sim.producer[u] < 0 and not flags[u]))
    raise PlanError(
        f"a replay rests on value {lost} ({sim.describe(lost)}), which the step overwrites: store what is "
        "made from it"
    )
