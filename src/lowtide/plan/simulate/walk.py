"""The walk through a step: which replayed copies are alive when, by rules 8 to 10 of docs/design.md."""

from __future__ import annotations

from collections import defaultdict
from operator import itemgetter
from typing import NamedTuple, Protocol

from lowtide.plan.simulate.index import Happening, Sources, StepIndex, replay_set


class LiveCopies(NamedTuple):
    """Which replayed copies are alive at one moment of a walk, for who wants to show them.

    Attributes:
        event: the moment is within it, or right after it.
        operation: the operation that runs again then, or -1 after the event.
        values: whose copies are alive.
        bytes: of those, and of what is fetched ahead.
        scratch_bytes: of the operation.
    """

    event: int
    operation: int
    values: frozenset[int]
    bytes: int
    scratch_bytes: int


class Places(Protocol):
    """When copies take their places in a slab; times are turns, counted up with each thing that happens."""

    turn: int

    def inherit(self, value: int, old: int) -> bool:
        """``value`` is written over the copy of ``old``. Returns whether that copy lies in the slab."""
        ...

    def end(self, value: int) -> None:
        """The copy of a value is freed."""
        ...


class Walk:
    """Which replayed copies are alive when: what a set of evicted values makes the executor do.

    Args:
        index: of the step.
        sources: where evicted values come back from.
        flags: as of `Simulator.flags`.
        running: the operations that run again.
        seen: is filled with what is held at each moment.

    Attributes:
        running: as given.
        repeats: operations that run once more because somebody unpacks a tensor a second time.
        level: (event, bytes) changes of the replayed copies' bytes, effective after the event.
        tops: (event, bytes of replayed copies at their most within the event, operation that runs then).
        places: notes when copies take places in a slab, where what moves has one.
    """

    places: Places | None = None

    def __init__(
        self,
        index: StepIndex,
        sources: Sources,
        flags: bytearray,
        running: list[int],
        seen: list[LiveCopies] | None = None,
    ) -> None:
        self.sim, self.sources, self.flags, self.running, self.seen = index, sources, flags, running, seen
        self.sizes = index.value_bytes
        """value -> what its copy takes"""
        self.left = defaultdict[int, int](int)
        """value -> readers that have not read it yet"""
        self.handed = defaultdict[int, int](int)
        """value -> tensors of it that backward holds now"""
        self.apart = defaultdict[int, list[int]](list)
        """value -> bytes of what later unpacks handed out, in their order; none for the cached copy"""
        self.cached: set[int] = set()
        self.there = bytearray(flags)
        """value -> whether it is stored, or cached"""
        self.live = 0
        self.level: list[tuple[int, int]] = []
        self.tops: list[tuple[int, int, int]] = []
        self.repeats: list[int] = []

    def run(self, happenings: list[Happening]) -> None:
        """Go through what happens to the copies, in the order of events."""
        left, handed, cached = self.left, self.handed, self.cached
        flags, reads = self.flags, self.sources.reads
        for again in self.running:
            for u in reads[again]:
                if not flags[u]:
                    left[u] += 1
        for _, what, value in happenings:
            if what == "unpack" or what == "gone":
                left[value] += 1
        for event, what, value in sorted(happenings, key=itemgetter(0)):
            if self.places is not None:
                self.places.turn += 1
            before = self.live
            if what == "unpack":
                if value not in cached:
                    self.replay(self._operations_for(value), event, left, cached)
                left[value] -= 1
                handed[value] += 1
            elif what == "done":
                handed[value] -= 1
                self._drop(value)
            elif what == "gone":
                left[value] -= 1
                self._drop(value)
            elif what == "again":
                self._again(value, event)
            elif what == "done again":
                self._done_again(value)
            else:
                self.begins(event)
            if self.live != before:
                self.level.append((event, self.live - before))
            if self.seen is not None:
                self.seen.append(LiveCopies(event, -1, frozenset(cached), self.live, 0))

    def _operations_for(self, value: int) -> list[int]:
        """The operations that bring a value back: most often its producer alone."""
        sources, there = self.sources, self.there
        index = sources.producer[value]
        for u in sources.reads[index]:
            if not there[u]:
                return sources.in_order(replay_set([value], sources.producer, sources.reads, there))
        return [index]

    def begins(self, event: int) -> None:
        """The backward begins: nothing is fetched ahead where nothing moves."""

    def fetched(self, value: int, again: bool) -> tuple[int, int]:
        """A moved value is fetched: bytes that were live for it ahead of need, and further scratch."""
        raise NotImplementedError

    def replay(
        self, needed: list[int], event: int, left: dict[int, int], cached: set[int], again: bool = False
    ) -> None:
        """Run the operations that bring a value back, in forward order.

        Args:
            needed: the operations.
            event: at which backward asks for it.
            left: value -> readers that have not read it yet; counted down.
            cached: values whose copies are cached; changed.
            again: whether this is a later unpack (rule 10): the result has memory of its own.
        """
        sim, sources, flags, handed = self.sim, self.sources, self.flags, self.handed
        reads = sources.reads
        sizes = sim.value_bytes if again else self.sizes
        places = None if again else self.places
        live, most, most_op = self.live, -1, -1
        there = bytearray(self.there) if again else self.there
        for index in needed:
            op = sources.operations[index]
            overwritten: set[int] = set()
            scratch = op.scratch_bytes
            if self.places is not None:
                self.places.turn += 1
            if index >= sources.own:
                early, more = self.fetched(op.writes[0], again)
                live, scratch = live - early, scratch + more
            for w in op.writes:
                old = sim.previous[w]
                if old >= 0 and old in op.reads and old in cached and left[old] == 1 and not handed[old]:
                    overwritten.add(old)
                    if places is not None and places.inherit(w, old):
                        sizes[w] = 0
                else:
                    live += sizes[w]
            if live + scratch > most:
                most, most_op = live + scratch, index
            if self.seen is not None:
                alive = frozenset(cached).difference(overwritten).union(op.writes)
                self.seen.append(LiveCopies(event, index, alive, live, scratch))
            for w in op.writes:
                if not flags[w] and left[w] > 0:
                    cached.add(w)
                    there[w] = 1
                else:
                    live -= sizes[w]
                    if places is not None:
                        places.end(w)
            for u in reads[index]:
                if flags[u]:
                    continue
                left[u] -= 1
                if u in overwritten:
                    cached.discard(u)
                    there[u] = 0
                elif not left[u] and u in cached and not handed[u]:
                    cached.discard(u)
                    there[u] = 0
                    live -= sizes[u]
                    if places is not None:
                        places.end(u)
        self.live = live
        self.tops.append((event, most, most_op))

    def _drop(self, value: int) -> None:
        """Free a replayed copy that has no readers left and that backward does not hold."""
        if value in self.cached and not self.left[value] and not self.handed[value]:
            self.cached.discard(value)
            self.there[value] = 0
            self.live -= self.sizes[value]
            if self.places is not None:
                self.places.end(value)

    def _again(self, value: int, event: int) -> None:
        """Rule 10: a later unpack of the same saved tensor takes the copy cached for others, or runs an
        uncached replay, whose result is there until backward drops it.
        """
        if value in self.cached and self.left[value]:
            self.handed[value] += 1
            self.apart[value].append(0)
            return
        before, needed = self.live, self._operations_for(value)
        left = defaultdict[int, int](int, {value: 1})
        for index in needed:
            for u in self.sources.operations[index].reads:
                left[u] += not self.flags[u]
        for u in self.cached:
            left[u] += u in left
        self.repeats += needed
        self.replay(needed, event, left, set(self.cached), again=True)
        self.apart[value].append(self.sim.value_bytes[value])
        self.live = before + self.apart[value][-1]

    def _done_again(self, value: int) -> None:
        """Backward has dropped what a later unpack handed out."""
        own = self.apart[value].pop(0)
        self.live -= own
        if not own:
            self.handed[value] -= 1
            self._drop(value)
