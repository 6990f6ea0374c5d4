"""Which values keep every replay where the gathered storages that it reads are filled.

Sharded weights are whole only while their unit runs. An operation may run again at an event where what it
reads is there; what lies between two units is then stored, or moved. The values found here are enough: with
them stored, no replay reads an empty storage, whatever else a plan stores or evicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def crossing(
    unpacked: Iterable[tuple[int, int]],
    present: Callable[[int, int], bool],
    stored: bytearray,
    producer: Sequence[int],
    reads: Sequence[Sequence[int]],
    storable: Sequence[int],
    sizes: Sequence[int],
) -> None:
    """Add to ``stored`` what keeps replays legal.

    Of each evicted value whose replay would run an operation where that cannot, the smallest value is added
    that all paths to such operations lead through.

    Args:
        unpacked: (value, event): backward asks for an evicted value, and replays bring it back.
        present: of an operation and an event, whether what it reads is there.
        stored: value -> whether it is stored; written to.
        producer: value -> the operation that makes it, or -1.
        reads: operation -> the values that it reads and that may be missing.
        storable: value -> whether a replay may begin from it.
        sizes: value -> its bytes.

    Example:
        Operation 0 makes value 1 with a weight, operation 1 makes value 2 from it, and backward asks for that
        at event 9, when the weight of operation 0 is gone.

        >>> stored = bytearray([1, 0, 0])
        >>> crossing([(2, 9)], lambda op, event: op > 0, stored, [-1, 0, 1], [[], [1]], [1, 1, 1], [4, 8, 16])
        >>> list(stored)
        [1, 1, 0]
    """
    there = bytearray(map(int.__and__, stored, storable))
    """value -> whether a replay begins from it"""
    for value, event in sorted(unpacked, key=lambda one: (producer[one[0]], one)):
        while not stored[value]:
            needed: set[int] = set()
            stack = [producer[value]]
            while stack:
                index = stack.pop()
                if index >= 0 and index not in needed:
                    needed.add(index)
                    stack += [producer[u] for u in reads[index] if not there[u]]
            far = {
                index
                for index in needed
                if not present(index, event) or any(stored[u] > storable[u] for u in reads[index])
            }
            if not far:
                break
            leads = set(far)  # and the operations that rest on them
            for index in sorted(needed):
                if any(not there[u] and producer[u] in leads for u in reads[index]):
                    leads.add(index)
            found = _narrowest(value, far, leads, there, producer, reads, storable, sizes)
            stored[found], there[found] = 1, storable[found]


def _narrowest(
    value: int,
    far: set[int],
    leads: set[int],
    there: bytearray,
    producer: Sequence[int],
    reads: Sequence[Sequence[int]],
    storable: Sequence[int],
    sizes: Sequence[int],
) -> int:
    """The smallest value, the earliest of equal ones, that all paths from ``value`` to ``far`` operations
    lead through.
    """
    cut, best = {value}, value
    while True:
        latest = max(cut, key=producer.__getitem__)
        if len(cut) == 1 and storable[latest] and sizes[latest] <= sizes[best]:
            best = latest
        index = producer[latest]
        if index in far:
            return best
        cut = {u for u in cut if producer[u] != index}
        cut |= {u for u in reads[index] if not there[u] and producer[u] in leads}
