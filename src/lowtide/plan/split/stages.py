"""Cut the forward of a step into stages that touch each other in few values.

In: a `Simulator`. Out: `Stages`: ranges of forward operations, and the stretch of backward (the window) in
which each one's saved tensors are unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lowtide.plan.simulate.simulator import Simulator

LONGEST_STAGE = 40
"""Most forward operations in a stage, where it can be cut."""


@dataclass(frozen=True)
class Stages:
    """The cut forward.

    Attributes:
        starts: position, in the list of forward operations, of each stage's first one, and the number of
            forward operations at the end.
        forward: indices of the forward operations.
        stage_of: value id -> stage that makes it (forward values only).
        everywhere: values that are stored in every plan because they are needed all over the step.
        window_events: event range of each stage's backward.
    """

    starts: tuple[int, ...]
    forward: tuple[int, ...]
    stage_of: dict[int, int]
    everywhere: frozenset[int]
    window_events: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def operations(self, first: int, last: int) -> tuple[int, ...]:
        """Indices of the operations of stages ``first`` to ``last`` (exclusive)."""
        return self.forward[self.starts[first] : self.starts[last]]


def find_stages(sim: Simulator) -> Stages:
    """Cut the forward where at most one value crosses, and longer stretches where the fewest bytes do."""
    graph = sim.graph
    forward = [op.index for op in graph.operations if op.phase == "forward"]
    position = {index: k for k, index in enumerate(forward)}
    count = len(forward)
    packs = [position.get(index, 0) for index in sim.packed_after]
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, index in enumerate(forward):
        op = graph.operations[index]
        last.update((u, at) for u in op.reads if u in born)
        for w in op.writes:
            born[w] = last[w] = at
    for tensor in graph.saved:
        if tensor.value in born:
            last[tensor.value] = max(last[tensor.value], packs[tensor.id])
    everywhere = frozenset(
        v for v in born if graph.values[v].storable and last[v] - born[v] > max(2 * LONGEST_STAGE, count // 5)
    )
    crossing, heavy, blocked = _crossings(sim, born, last, everywhere, count)
    starts = _cut(count, crossing, heavy, blocked)
    of_position = [0] * count
    for k in range(len(starts) - 1):
        for at in range(starts[k], starts[k + 1]):
            of_position[at] = k
    return Stages(
        tuple(starts),
        tuple(forward),
        {v: of_position[at] for v, at in born.items()},
        everywhere,
        _windows(sim, len(starts) - 1, packs, of_position),
    )


def _crossings(
    sim: Simulator, born: dict[int, int], last: dict[int, int], everywhere: frozenset[int], count: int
) -> tuple[list[int], list[int], list[bool]]:
    """Per gap after a position: how many values cross, their bytes, and whether one of them cannot be
    stored.
    """
    change = np.zeros((count + 1, 3), dtype=np.int64)
    for v, start in born.items():
        if last[v] > start and v not in everywhere:
            what = (1, sim.value_bytes[v], not sim.storable[v])
            change[start] += what
            change[last[v]] -= what
    crossing, heavy, bad = np.cumsum(change, axis=0).T.tolist()
    return crossing, heavy, [b > 0 for b in bad]


def _cut(count: int, crossing: list[int], heavy: list[int], blocked: list[bool]) -> list[int]:
    starts = [0]
    starts += [k + 1 for k in range(count - 1) if crossing[k] <= 1 and not blocked[k]]
    starts.append(count)
    merged = [0]
    for k in range(1, len(starts)):
        # Stages of one or two operations say nothing of memory: they are joined with what follows.
        if starts[k] == count or starts[k] - merged[-1] >= 6:
            merged.append(starts[k])
    result = [0]
    for a, b in pairwise(merged):
        result += _split(a, b, heavy, blocked)
    return result if len(result) > 1 else [0, count]


def _split(a: int, b: int, heavy: list[int], blocked: list[bool]) -> list[int]:
    """End positions of the parts of ``a`` to ``b``, none longer than `LONGEST_STAGE` where that is
    possible.
    """
    if b - a <= LONGEST_STAGE:
        return [b]
    quarter = (b - a) // 4
    middle = (a + b) / 2
    gaps = [k for k in range(a + quarter, b - quarter) if not blocked[k]]
    if not gaps:
        return [b]
    best = min(gaps, key=lambda k: (heavy[k], abs(k - middle), k)) + 1
    return [*_split(a, best, heavy, blocked), *_split(best, b, heavy, blocked)]


def _windows(
    sim: Simulator, stages: int, packs: list[int], of_position: list[int]
) -> tuple[tuple[int, int], ...]:
    """The event range of each stage's backward: from its first unpack to that of the stage before it."""
    first = [sim.end] * stages
    for tensor, at in enumerate(packs):
        if sim.unpacks[tensor]:
            k = of_position[at]
            first[k] = min(first[k], sim.unpacks[tensor][0][0])
    for k in range(1, stages):
        first[k] = min(first[k], first[k - 1])
    return tuple((first[k], sim.end if k == 0 else first[k - 1]) for k in range(stages))
