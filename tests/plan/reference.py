"""The rules of docs/design.md once more, written as slowly and plainly as possible: what the fast simulator
is compared with.
"""

from __future__ import annotations

from collections.abc import Collection

from lowtide.graph import StepGraph


class Infeasible(Exception):
    """The stored values do not suffice."""


def needed_operations(graph: StepGraph, given: list[int], stored: set[int]) -> set[int]:
    """Rule 6."""
    needed: set[int] = set()

    def bring(value: int) -> None:
        v = graph.values[value]
        if v.producer is None:
            raise Infeasible
        if v.producer in needed:
            return
        needed.add(v.producer)
        op = graph.operations[v.producer]
        if not op.replayable:
            raise Infeasible
        for u in op.reads:
            if u in stored and not graph.values[u].storable:
                raise Infeasible
            if u not in stored:
                bring(u)

    for value in given:
        bring(value)
    return needed


def refuse_absent(graph: StepGraph, given: list[int], stored: set[int]) -> None:
    """Rule 6 of gathered storages: what is unpacked rests on nothing that is empty then."""
    gathered = {s.id for s in graph.storages if s.kind == "gathered"}
    filled = set(gathered) - set(graph.begin_empty)
    unpacked: set[int] = set()
    for kind, index in graph.events:
        if kind == "fill":
            filled.add(index)
        elif kind == "empty":
            filled.discard(index)
        elif kind == "unpack" and graph.saved[index].droppable and graph.saved[index].value in given:
            value = graph.saved[index].value
            if value in unpacked:
                continue
            unpacked.add(value)
            for i in needed_operations(graph, [value], stored):
                read = {graph.values[u].storage for u in graph.operations[i].reads}
                if read & gathered - filled:
                    raise Infeasible


def walk(graph: StepGraph, kept: Collection[int]) -> tuple[int, float, set[int]]:
    """Peak bytes, extra seconds and the operations that run again, of the step that stores ``kept``."""
    stored = set(kept) | {v.id for v in graph.values if v.producer is None and v.storable}
    droppable = [s for s in graph.saved if s.droppable and graph.values[s.value].producer is not None]
    given_tensors = [s for s in droppable if s.value not in stored]
    given = sorted({s.value for s in given_tensors})
    every = needed_operations(graph, given, stored)
    refuse_absent(graph, given, stored)
    unpacked = {index for kind, index in graph.events if kind == "unpack"}
    again = needed_operations(
        graph,
        sorted(
            {
                s.value
                for s in given_tensors
                if any(o.id in unpacked for o in graph.saved if o.value == s.value)
            }
        ),
        stored,
    )
    # Rule 7: which saved tensors keep which stored storage.
    keeps: dict[int, set[tuple[str, int]]] = {}

    def rests(value: int, seen: set[int]) -> set[int]:
        op = graph.operations[graph.values[value].producer or 0]
        found: set[int] = set()
        for u in op.reads:
            if u in stored:
                found.add(u)
            elif u not in seen:
                seen.add(u)
                found |= rests(u, seen)
        return found

    for s in graph.saved:
        if not s.droppable or s.value in stored:
            keeps.setdefault(graph.values[s.value].storage, set()).update({("release", s.id), ("done", s.id)})
    for s in given_tensors:
        for u in rests(s.value, set()):
            keeps.setdefault(graph.values[u].storage, set()).add(("release", s.id))
    done_events = {index for kind, index in graph.events if kind == "done"}
    for waits in keeps.values():
        for kind, index in list(waits):
            if kind == "done" and index not in done_events and index not in unpacked:
                waits.discard((kind, index))
    assert every >= again

    live = {s.id for s in graph.storages if s.producer is None}
    emptied: set[int] = set(graph.begin_empty)
    base = graph.resident_bytes - sum(graph.storages[s].bytes for s in live - emptied)
    freed: set[int] = set()
    copies: dict[int, int] = {}  # value -> bytes
    readers: dict[int, set[tuple[str, int]]] = {}
    for i in every:
        for u in graph.operations[i].reads:
            if u not in stored:
                readers.setdefault(u, set()).add(("op", i))
    for s in given_tensors:
        readers.setdefault(s.value, set()).add(("saved", s.id))
    # Who could ask for an operation: the evicted tensors that are not released yet. One that nobody can ask
    # for reads nothing any more.
    may_ask = {s.id: needed_operations(graph, [s.value], stored) for s in given_tensors}
    handed: dict[int, set[int]] = {}
    ran: set[int] = set()
    peak = graph.resident_bytes
    extra = 0.0
    once: set[int] = set()

    def total() -> int:
        return base + sum(graph.storages[s].bytes for s in live - emptied) + sum(copies.values())

    def tidy() -> None:
        for v in list(copies):
            if not readers.get(v) and not handed.get(v):
                del copies[v]
        for s in list(live):
            storage = graph.storages[s]
            if s in freed and not keeps.get(s) and (storage.producer is not None or storage.kind == "input"):
                live.discard(s)

    def run(index: int) -> None:
        nonlocal peak, extra
        assert index not in ran
        ran.add(index)
        op = graph.operations[index]
        extra += op.seconds + graph.replay_overhead_seconds
        transient = 0
        for w in op.writes:
            v = graph.values[w]
            old = next(
                (
                    u
                    for u in op.reads
                    if graph.values[u].storage == v.storage and graph.values[u].version == v.version - 1
                ),
                None,
            )
            if old in copies and readers[old] == {("op", index)} and not handed.get(old):
                del copies[old]
            if w not in stored and readers.get(w):
                copies[w] = graph.storages[v.storage].bytes
            else:
                transient += graph.storages[v.storage].bytes
        peak = max(peak, total() + transient + op.scratch_bytes)
        for u in op.reads:
            readers.get(u, set()).discard(("op", index))
        tidy()

    for kind, index in graph.events:
        if kind == "op":
            op = graph.operations[index]
            live.update(s.id for s in graph.storages if s.producer == index)
            peak = max(peak, total() + op.scratch_bytes)
        elif kind == "free":
            freed.add(index)
        elif kind == "empty":
            emptied.add(index)
        elif kind == "fill":
            emptied.discard(index)
        elif kind == "unpack":
            s = graph.saved[index]
            if s in given_tensors:
                assert index not in once
                once.add(index)
                if s.value not in copies:
                    todo: set[int] = set()
                    stack = [s.value]
                    while stack:
                        producer = graph.values[stack.pop()].producer
                        assert producer is not None
                        if producer not in todo:
                            todo.add(producer)
                            stack += [
                                u
                                for u in graph.operations[producer].reads
                                if u not in stored and u not in copies
                            ]
                    for i in sorted(todo):
                        run(i)
                readers[s.value].discard(("saved", index))
                handed.setdefault(s.value, set()).add(index)
        elif kind in ("done", "release"):
            if kind == "done":
                for holders in handed.values():
                    holders.discard(index)
            for waits in keeps.values():
                waits.discard((kind, index))
            if kind == "release" and index in may_ask:
                let_go = may_ask.pop(index) - set().union(*may_ask.values())
                for waiting in readers.values():
                    waiting -= {("saved", index), *(("op", i) for i in let_go)}
        tidy()
        peak = max(peak, total())
    if given:
        extra += graph.overhead_seconds
    return peak, extra, again
