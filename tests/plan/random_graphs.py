"""Small random step graphs for property tests."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

from synthetic import Tape

from lowtide.errors import PlanError
from lowtide.graph import Event, StepGraph, Storage, Value
from lowtide.plan.simulate import Simulator


def random_graph(seed: int, operations: int = 7) -> StepGraph:
    """A random forward with branches, several outputs, in-place writes and operations that cannot run again,
    and its backward.
    """
    random = Random(seed)
    tape = Tape()
    alive = [tape.before(random.choice([4, 16]), random.choice(["input", "parameter"]))]
    for k in range(operations):
        tape.module = f"layers.{k // 3}"
        reads = random.sample(alive, min(len(alive), random.choice([1, 1, 2])))
        recent = [v for v in alive[-2:] if v not in reads]
        if recent and random.random() < 0.6:
            reads[0] = recent[-1]
        kind = random.random()
        untouched = not any(s.value == reads[0] for s in tape.saved) or random.random() < 0.4
        if kind < 0.2 and tape.values[reads[0]].producer is not None and untouched:
            made = tape.op(
                "inplace",
                reads[1:],
                mutates=[reads[0]],
                seconds=random.randint(1, 9),
                scratch=random.choice([0, 0, 8]),
            )
            alive = [v for v in alive if v != reads[0]]
        elif kind < 0.27:
            (empty,) = tape.op("empty", [], [random.choice([4, 8])], seconds=0.5)
            made = tape.op("bernoulli_", [], unseen=[empty], random=True, seconds=random.randint(1, 5))
        else:
            outs = [random.choice([4, 8, 16, 32]) for _ in range(random.choice([1, 1, 1, 2]))]
            made = tape.op(
                f"op{k}",
                reads,
                outs,
                seconds=random.randint(1, 9),
                scratch=random.choice([0, 0, 16]),
                replayable=random.random() > 0.06,
            )
        saved = [
            tape.save(v)
            for v in dict.fromkeys([*reads, *made])
            if random.random() < 0.55 and tape.newest[tape.values[v].storage] == v
        ]
        inputs = [v for v in reads if tape.newest[tape.values[v].storage] == v]
        tape.node(f"grad{k}", saved, made[0], inputs, random.randint(1, 5), random.choice([0, 0, 8]))
        alive += made
    tape.backward()
    return tape.graph(
        replay_overhead_seconds=random.choice([0.0, 0.25]), overhead_seconds=random.choice([0.0, 0.5])
    )


def with_unasked(graph: StepGraph, seed: int, share: float = 0.3) -> StepGraph:
    """The same step where backward never asks for some of the saved tensors, which are released at any time
    after they were packed.
    """
    random = Random(seed)
    events = list(graph.events)
    for saved in graph.saved:
        if random.random() < share:
            events = [e for e in events if e.kind not in ("unpack", "done", "release") or e.index != saved.id]
            at = random.randint(events.index(Event("pack", saved.id)) + 1, len(events))
            events.insert(at, Event("release", saved.id))
    return replace(graph, events=tuple(events))


def with_gathered(graph: StepGraph, seed: int, count: int = 2) -> StepGraph:
    """The same step where some operations read sharded weights that the program fills and empties."""
    random = Random(seed)
    storages, values, events = list(graph.storages), list(graph.values), list(graph.events)
    operations, resident = list(graph.operations), graph.resident_bytes
    for _ in range(count if graph.operations else 0):
        sid, value = len(storages), len(values)
        storages.append(Storage(sid, random.choice([4, 16]), "gathered"))
        values.append(Value(value, sid, 0, None))
        for at in random.sample(range(len(operations)), (len(operations) + 2) // 3):
            operations[at] = replace(operations[at], reads=(*operations[at].reads, value))
        filled = random.random() < 0.5
        resident += filled * storages[sid].bytes
        for at in sorted(random.sample(range(len(events)), min(len(events), random.randint(1, 4)))):
            filled = not filled
            events.insert(at, Event("fill" if filled else "empty", sid))
    return replace(
        graph,
        operations=tuple(operations),
        storages=tuple(storages),
        values=tuple(values),
        events=tuple(events),
        resident_bytes=resident,
    )


def with_resized(graph: StepGraph, seed: int, share: float = 0.3) -> StepGraph:
    """The same step where the program empties some of its storages after they were made, and fills most of
    them again.
    """
    random = Random(seed)
    sids = {s.id for s in graph.storages if s.producer is not None and random.random() < share}
    resized = {v.id for v in graph.values if v.storage in sids}
    events = list(graph.events)
    for sid in sorted(sids):
        at = events.index(Event("op", graph.storages[sid].producer or 0)) + 1
        for kind in random.choice([("empty",), ("empty", "fill"), ("empty", "fill", "empty")]):
            at = random.randint(at, len(events))
            events.insert(at, Event(kind, sid))  # type: ignore[arg-type]
            at += 1
    changed = graph.with_operations(
        lambda op: op if resized.isdisjoint((*op.reads, *op.writes)) else replace(op, replayable=False)
    )
    return replace(
        changed,
        events=tuple(events),
        values=tuple(replace(v, storable=v.storable and v.id not in resized) for v in graph.values),
        saved=tuple(replace(s, droppable=s.droppable and s.value not in resized) for s in graph.saved),
    )


def all_plans(graph: StepGraph) -> list[tuple[int, float]]:
    """(peak, extra seconds) of every feasible set of stored values."""
    sim = Simulator(graph)
    saved = set(sim.droppable)
    choices = [v.id for v in graph.values if v.producer is not None and (v.storable or v.id in saved)]
    choices = [v for v in choices if v in saved or sim.readers[v]]
    found: list[tuple[int, float]] = []
    for size in range(len(choices) + 1):
        for stored in combinations(choices, size):
            try:
                step = sim.simulate(stored)
            except PlanError:
                continue
            found.append((step.peak_bytes, step.extra_seconds))
    return found
