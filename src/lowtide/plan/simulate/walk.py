"""The walk through a step: which replayed copies are alive when, by rules 8 to 10 of docs/design.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

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


class Places:
    """When each moved value, and its encoded form, takes its place in the slab. Times are turns, which are
    counted up with each thing that happens in the walk.
    """

    def __init__(self, sources: Sources) -> None:
        self._moved = sources.moved
        self._born: dict[tuple[int, bool], int] = {}
        self._died: dict[tuple[int, bool], int] = {}
        self._of: dict[int, int] = {}
        """value -> the moved value in whose place its copy lies"""
        self.turn = 0

    def begin(self, value: int, ahead: bool) -> None:
        """A moved value takes its place: its fetch ``ahead`` of need is started, or it has come back."""
        arriving = bool(self._moved[value].arriving_bytes)
        if arriving:
            self._born.setdefault((value, True), self.turn)
        if not (arriving and ahead):
            self._born.setdefault((value, False), self.turn)
        if not ahead:
            self._of[value] = value
            if arriving:
                self._died[value, True] = self.turn + 1

    def inherit(self, value: int, old: int) -> bool:
        """``value`` is written over the copy of ``old``. Returns whether that copy lies in the slab."""
        if old in self._of:
            self._of[value] = self._of.pop(old)
        return value in self._of

    def end(self, value: int) -> None:
        """The copy of a value is freed."""
        if value in self._of:
            self._died[self._of.pop(value), False] = self.turn + 1

    def spans(self) -> dict[tuple[int, bool], tuple[int, int]]:
        """(moved value, whether of its encoded form) -> half-open turns in which its place is taken."""
        return {key: (born, self._died.get(key, self.turn + 1)) for key, born in self._born.items()}


class Walk:
    """Which replayed copies are alive when: what a set of evicted values makes the executor do.

    Args:
        index: of the step.
        sources: where evicted values come back from.
        flags: as of `Simulator.flags`.
        running: the operations that run again.
        ahead: moved values in the order in which they are fetched ahead of need; without it they are fetched
            when they are needed.
        seen: is filled with what is held at each moment.

    Attributes:
        running: as given.
        repeats: operations that run once more because somebody unpacks a tensor a second time.
        level: (event, bytes) changes of the replayed copies' bytes, effective after the event.
        tops: (event, bytes of replayed copies at their most within the event, operation that runs then).
        fetched: moved values in the order in which they are fetched.
        work: (event, operations that run then, moved values that are asked to be fetched ahead after it), in
            order.
        places: in the slab.
    """

    def __init__(
        self,
        index: StepIndex,
        sources: Sources,
        flags: bytearray,
        running: list[int],
        ahead: Iterable[int] = (),
        seen: list[LiveCopies] | None = None,
    ) -> None:
        self.sim, self.sources, self.flags, self.running, self.seen = index, sources, flags, running, seen
        self.places = Places(sources)
        self.sizes = list(index.value_bytes) if sources.slab else index.value_bytes
        """value -> what its copy takes: nothing where that lies in the slab"""
        for value in sources.moved if sources.slab else ():
            self.sizes[value] = 0
        self._ahead = list(reversed(list(ahead)))
        self._early: dict[int, int] = {}
        """moved value -> bytes that were fetched ahead for it and are not in use yet"""
        self.fetched: list[int] = []
        self.work: list[tuple[int, list[int], list[int]]] = []
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
        sim, left, handed, cached = self.sim, self.left, self.handed, self.cached
        flags, reads, moving = self.flags, self.sources.reads, bool(self.sources.moved)
        for again in self.running:
            for u in reads[again]:
                if not flags[u]:
                    left[u] += 1
        for _, what, value in happenings:
            if what == "unpack" or what == "gone":
                left[value] += 1
        if moving and sim.first_unpack < sim.end:
            happenings = [*happenings, (sim.first_unpack, "begins", -1)]
        for event, what, value in sorted(happenings, key=itemgetter(0)):
            self.places.turn += 1
            before = self.live
            if what == "unpack":
                if value not in cached:
                    self._bring(value, event, left, cached)
                    if moving:
                        self._fetch_ahead(event)
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
                self._fetch_ahead(event)
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

    def _early_bytes(self, value: int) -> int:
        """Bytes that fetching a value ahead allocates."""
        moved = self.sources.moved[value]
        if self.sources.slab:
            return 0 if moved.tier else moved.gather_bytes
        return moved.ahead_bytes

    def _fetch_ahead(self, event: int) -> None:
        """Start fetching what comes next while there is room in the window."""
        sources, begun = self.sources, list[int]()
        self.places.turn += 1
        room = sources.window_bytes - sum(self._early.values())
        while self._ahead:
            value = self._ahead[-1]
            size = sources.moved[value].ahead_bytes
            if value not in self.fetched:
                if size > room:
                    break
                room -= size
                self._early[value] = size
                self.live += self._early_bytes(value)
                if sources.slab and size:
                    self.places.begin(value, ahead=True)
                begun.append(value)
            self._ahead.pop()
        if begun:
            self.work.append((event, [], begun))

    def _bring(
        self, value: int, event: int, left: dict[int, int], cached: set[int], again: bool = False
    ) -> None:
        """Run the operations that bring ``value`` back, in forward order.

        Args:
            value: the value.
            event: at which backward asks for it.
            left: value -> readers that have not read it yet; counted down.
            cached: values whose copies are cached; changed.
            again: whether this is a later unpack (rule 10): the result has memory of its own.
        """
        sim, sources, flags, handed = self.sim, self.sources, self.flags, self.handed
        reads = sources.reads
        sizes = sim.value_bytes if again else self.sizes
        slab = sources.slab and not again
        live, most, most_op = self.live, -1, -1
        needed = self._operations_for(value)
        there = bytearray(self.there) if again else self.there
        if sources.moved:
            self.work.append((event, needed, []))
        for index in needed:
            op = sources.operations[index]
            overwritten: set[int] = set()
            scratch = op.scratch_bytes
            self.places.turn += 1
            if index >= sources.own:
                brought = op.writes[0]
                self.fetched.append(brought)
                if self._early.pop(brought, 0):
                    live -= self._early_bytes(brought)
                if slab:
                    self.places.begin(brought, ahead=False)
                elif sources.slab:
                    scratch += sources.moved[brought].arriving_bytes
            for w in op.writes:
                old = sim.previous[w]
                if old >= 0 and old in op.reads and old in cached and left[old] == 1 and not handed[old]:
                    overwritten.add(old)
                    if slab and self.places.inherit(w, old):
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
                    if slab:
                        self.places.end(w)
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
                    if slab:
                        self.places.end(u)
        self.live = live
        self.tops.append((event, most, most_op))

    def _drop(self, value: int) -> None:
        """Free a replayed copy that has no readers left and that backward does not hold."""
        if value in self.cached and not self.left[value] and not self.handed[value]:
            self.cached.discard(value)
            self.there[value] = 0
            self.live -= self.sizes[value]
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
        self._bring(value, event, left, set(self.cached), again=True)
        self.apart[value].append(self.sim.value_bytes[value])
        self.live = before + self.apart[value][-1]

    def _done_again(self, value: int) -> None:
        """Backward has dropped what a later unpack handed out."""
        own = self.apart[value].pop(0)
        self.live -= own
        if not own:
            self.handed[value] -= 1
            self._drop(value)
