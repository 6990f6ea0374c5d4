"""Cut the forward of a step into stages that touch each other in few values, and tell which stages are alike.

In: a `Simulator`. Out: `Stages`: ranges of forward operations, the events that belong to each, and who owns
the values that cross the cuts. A stage's saved tensors are unpacked in one stretch of backward (its window),
so what one stage keeps adds to every other stage's memory as a constant, and each distinct stage can be
solved on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from lowtide.plan.simulate.simulator import Bytes, Simulator

LONGEST_STAGE = 40
"""Most forward operations in a stage: its configurations are searched one flip at a time."""


@dataclass(frozen=True)
class Stages:
    """The cut forward.

    Attributes:
        starts: position, in the list of forward operations, of each stage's first one, and the number of
            forward operations at the end.
        forward: indices of the forward operations.
        stage_of: value id -> stage that makes it (forward values only).
        last_stage: value id -> last stage that reads or saves it.
        owner: value id -> stage whose need lasts longest in backward, for values that cross a cut.
        everywhere: values that are stored in every plan because they are needed all over the step.
        forward_events: event range of each stage's forward.
        window_events: event range of each stage's backward.
        signature: stages with equal signatures are alike.
        base: at every event, the most live bytes when nothing but ``everywhere`` is stored.
    """

    starts: tuple[int, ...]
    forward: tuple[int, ...]
    stage_of: dict[int, int]
    last_stage: dict[int, int]
    owner: dict[int, int]
    everywhere: frozenset[int]
    forward_events: tuple[tuple[int, int], ...]
    window_events: tuple[tuple[int, int], ...]
    signature: tuple[int, ...]
    base: Bytes

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
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    packs = _pack_positions(sim, position)
    for index in forward:
        op = graph.operations[index]
        for u in op.reads:
            if u in born:
                last[u] = position[index]
        for w in op.writes:
            born[w] = last[w] = position[index]
    for tensor, at in packs.items():
        value = graph.saved[tensor].value
        if value in born:
            last[value] = max(last[value], at)
    everywhere = frozenset(
        v for v in born if graph.values[v].storable and last[v] - born[v] > max(2 * LONGEST_STAGE, count // 5)
    )
    crossing, heavy, blocked = _crossings(sim, born, last, everywhere, count)
    starts = _cut(count, crossing, heavy, blocked)
    of_position = [0] * count
    for k in range(len(starts) - 1):
        for at in range(starts[k], starts[k + 1]):
            of_position[at] = k
    stage_of = {v: of_position[at] for v, at in born.items()}
    last_stage = {v: of_position[at] for v, at in last.items()}
    owner = _owners(sim, stage_of, last_stage, packs, of_position, position)
    forward_events, window_events = _event_ranges(sim, starts, forward, packs, of_position)
    signature = _signatures(sim, starts, forward, forward_events, window_events)
    base = _base(sim, everywhere, window_events, of_position, position)
    return Stages(
        tuple(starts),
        tuple(forward),
        stage_of,
        last_stage,
        owner,
        everywhere,
        forward_events,
        window_events,
        signature,
        base,
    )


def _base(
    sim: Simulator,
    everywhere: frozenset[int],
    windows: tuple[tuple[int, int], ...],
    of_position: list[int],
    position: dict[int, int],
) -> Bytes:
    base = sim.natural_live + sim.scratch
    for v in sorted(everywhere):
        start = sim.natural_end[sim.storage_of[v]]
        readers = [windows[of_position[position[i]]][1] for i in sim.readers[v] if i in position]
        until = max([sim.saved_hold.get(v, start), *readers])
        if start < until:
            base[start:until] += sim.value_bytes[v]
    return base


def _pack_positions(sim: Simulator, position: dict[int, int]) -> dict[int, int]:
    """Saved tensor -> position of the forward operation after which it is packed."""
    packs: dict[int, int] = {}
    at = 0
    for kind, index in sim.graph.events:
        if kind == "op" and index in position:
            at = position[index]
        elif kind == "pack":
            packs[index] = at
    return packs


def _crossings(
    sim: Simulator, born: dict[int, int], last: dict[int, int], everywhere: frozenset[int], count: int
) -> tuple[list[int], list[int], list[bool]]:
    """Per gap after a position: how many values cross, their bytes, and whether one of them cannot be
    stored.
    """
    crossing = [0] * (count + 1)
    heavy = [0] * (count + 1)
    bad = [0] * (count + 1)
    for v, start in born.items():
        stop = last[v]
        if stop <= start or v in everywhere:
            continue
        for table, amount in (
            (crossing, 1),
            (heavy, sim.value_bytes[v]),
            (bad, 0 if sim.graph.values[v].storable else 1),
        ):
            table[start] += amount
            table[stop] -= amount
    for table in (crossing, heavy, bad):
        for k in range(1, count + 1):
            table[k] += table[k - 1]
    return crossing, heavy, [b > 0 for b in bad]


def _cut(count: int, crossing: list[int], heavy: list[int], blocked: list[bool]) -> list[int]:
    starts = [0]
    starts += [k + 1 for k in range(count - 1) if crossing[k] <= 1 and not blocked[k]]
    starts.append(count)
    merged = [0]
    for k in range(1, len(starts)):
        # Stages of one or two operations tell the search nothing: join them with what follows while they stay
        # small.
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


def _owners(
    sim: Simulator,
    stage_of: dict[int, int],
    last_stage: dict[int, int],
    packs: dict[int, int],
    of_position: list[int],
    position: dict[int, int],
) -> dict[int, int]:
    owner: dict[int, int] = {}
    for v, made in stage_of.items():
        if last_stage[v] == made:
            continue
        saved = [of_position[packs[t]] for t in sim.saved_of.get(v, ()) if t in packs]
        read = [of_position[position[i]] for i in sim.readers[v] if i in position]
        owner[v] = min(saved) if saved else min(read, default=made)
    return owner


def _event_ranges(
    sim: Simulator, starts: list[int], forward: list[int], packs: dict[int, int], of_position: list[int]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    stages = len(starts) - 1
    end = sim.end
    first = [end] * stages
    for tensor, at in packs.items():
        if sim.unpacks[tensor]:
            k = of_position[at]
            first[k] = min(first[k], sim.unpacks[tensor][0][0])
    for k in range(1, stages):
        first[k] = min(first[k], first[k - 1])
    begin = [0, *(sim.op_event[forward[starts[k]]] for k in range(1, stages))]
    stop = [*begin[1:], max(begin[-1], first[-1])]
    windows = [(first[k], end if k == 0 else first[k - 1]) for k in range(stages)]
    return tuple(zip(begin, stop, strict=True)), tuple(windows)


def _signatures(
    sim: Simulator,
    starts: list[int],
    forward: list[int],
    forward_events: tuple[tuple[int, int], ...],
    window_events: tuple[tuple[int, int], ...],
) -> tuple[int, ...]:
    """Small integers, equal where two stages have equal operations, values and events."""
    graph = sim.graph
    known: dict[tuple[object, ...], int] = {}
    result: list[int] = []
    for k in range(len(starts) - 1):
        names: dict[tuple[str, int], int] = {}

        def local(kind: str, index: int, names: dict[tuple[str, int], int] = names) -> int:
            return names.setdefault((kind, index), len(names))

        parts: list[object] = []
        for index in forward[starts[k] : starts[k + 1]]:
            op = graph.operations[index]
            parts.append((op.name, op.replayable, op.random, op.scratch_bytes))
            for v in [*op.reads, -1, *op.writes]:
                if v >= 0:
                    value = graph.values[v]
                    old = value.producer is None
                    parts.append(
                        (-2, sim.value_bytes[v])
                        if old
                        else (
                            local("value", v),
                            local("storage", value.storage),
                            value.storable,
                            value.must_store,
                        )
                    )
                    parts.append(0 if old else sim.value_bytes[v])
        for a, b in (forward_events[k], window_events[k]):
            parts.append(b - a)
            for event in range(a, b):
                kind, index = graph.events[event]
                if kind == "op":
                    parts.append(graph.operations[index].name)
                    parts.append(graph.operations[index].scratch_bytes)
                elif kind == "free":
                    parts.append(("free", graph.storages[index].bytes))
                else:
                    value = graph.saved[index].value
                    parts.append(
                        (kind, local("saved", index), local("value", value), graph.saved[index].droppable)
                    )
        result.append(known.setdefault(tuple(parts), len(known)))
    return tuple(result)
