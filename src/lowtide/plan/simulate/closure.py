"""Which operations bring values back: the backward slice over producers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def replay_set(
    values: Iterable[int],
    producer: Sequence[int],
    reads: Sequence[Sequence[int]],
    there: Callable[[int], object],
) -> set[int]:
    """The operations that run again to bring ``values`` back; -1 is among them where that rests on something
    that nothing made.

    Args:
        values: ids of the values.
        producer: value -> the operation that makes it, or -1.
        reads: operation -> the values that it reads.
        there: whether a value that is read need not be brought back.

    Example:
        Operation 0 makes value 1 from 0, operation 1 makes 2 from 1.

        >>> sorted(replay_set([2], [-1, 0, 1], [[0], [1]], {0}.__contains__))
        [0, 1]
        >>> sorted(replay_set([2], [-1, 0, 1], [[0], [1]], {1}.__contains__))
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
            stack += [producer[u] for u in reads[index] if not there(u)]
    return found
