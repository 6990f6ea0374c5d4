"""What replays hold while backward runs: rules 8 to 10 of docs/design.md."""

from __future__ import annotations

from lowtide.plan.simulate.closure import replay_set
from lowtide.plan.simulate.index import (
    BACKWARD_BEGINS,
    DONE,
    RELEASED,
    UNPACKED,
    UNPACKED_AGAIN,
    UNREPLAYED,
    Held,
    StepIndex,
)


class Walk:
    """Rules 8 to 10: which replayed copies are alive when; what a set of evicted values makes the executor
    do.

    Args:
        index: of the step.
        flags: as of `StepIndex.flags`.
        running: the operations that run again.
        idle: those that could and never do, for what rests on them is never unpacked -> when the last of that
            is released.
        ahead: moved values in the order in which they are fetched ahead of need; without it they are fetched
            when they are needed.

    Attributes:
        running: as given.
        repeats: operations that run once more because somebody unpacks a tensor a second time.
        hold: value id -> event until which a stored value is held for others that rest on it.
        until: operation -> the last release of what rests on it.
        level: (event, bytes) changes of the replayed copies' bytes, effective after the event.
        tops: (event, bytes of replayed copies at their most within the event, operation that runs then).
        fetched: moved values in the order in which they are fetched.
        work: (event, operations that run then, moved values that are asked to be fetched ahead after it), in
            order.
    """

    def __init__(
        self,
        index: StepIndex,
        flags: bytearray,
        running: list[int],
        idle: dict[int, int],
        ahead: list[int] | None = None,
    ) -> None:
        self.sim = index
        self.flags = flags
        self.operations = index.operations
        self.reads = reads = index.reads
        self.running = running
        self.hold: dict[int, int] = {}
        self.until: dict[int, int] = {}
        self.ahead = ahead or []
        self.next = 0
        self.early: dict[int, int] = {}
        """moved value -> bytes that were fetched ahead for it and are not in use yet"""
        self.sizes = list(index.value_bytes) if index.slab else index.value_bytes
        """value -> what its copy takes: nothing where that lies in the slab"""
        self.born: dict[tuple[int, bool], int] = {}
        self.died: dict[tuple[int, bool], int] = {}
        self.place_of: dict[int, int] = {}
        """value -> the moved value in whose place in the slab its copy lies"""
        self.turn = 0
        """rises with all that happens"""
        if index.slab:
            for value in index.moved:
                self.sizes[value] = 0
        self.fetched: list[int] = []
        self.work: list[tuple[int, list[int], list[int]]] = []
        self.left: dict[int, int] = {}
        """value -> readers that have not read it yet."""
        left = self.left
        for again in (*running, *idle):
            for u in reads[again]:
                if not flags[u]:
                    left[u] = left.get(u, 0) + 1
        self.idle = idle
        self.handed: dict[int, int] = {}
        """value -> tensors of it that backward holds now."""
        self.cached: set[int] = set()
        self.live = 0
        self.level: list[tuple[int, int]] = []
        self.tops: list[tuple[int, int, int]] = []
        self.repeats: list[int] = []
        self.seen = index.seen
        if self.seen is not None:
            self.seen.clear()  # the walk before this one only showed the order

    def spans(self) -> dict[tuple[int, bool], tuple[int, int]]:
        """When places in the slab are taken."""
        return {key: (born, self.died.get(key, self.turn + 1)) for key, born in self.born.items()}

    def _begins(self, value: int, ahead: bool) -> None:
        """A moved value, or its encoded form, comes into its place in the slab."""
        arriving = bool(self.sim.moved[value].arriving_bytes)
        if arriving:
            self.born.setdefault((value, True), self.turn)
        if not (arriving and ahead):
            self.born.setdefault((value, False), self.turn)
        if not ahead:
            self.place_of[value] = value
            if arriving:
                self.died[value, True] = self.turn + 1

    def _ends(self, value: int) -> None:
        """Nobody has the copy of a value any more."""
        place = self.place_of.pop(value, None)
        if place is not None:
            self.died[place, False] = self.turn + 1

    def run(self, evicted: list[int], unasked: list[int]) -> None:
        """Walk the unpack and done events of ``evicted``, and the releases of the saved tensors ``unasked``,
        which wait for nothing.
        """
        sim = self.sim
        events: list[tuple[int, int, int]] = []
        for value in evicted:
            events += sim.value_events[value]
            self.left[value] = self.left.get(value, 0) + sim.asking[value]
        if sim.moved and sim.first_unpack < sim.end:
            events.append((sim.first_unpack, BACKWARD_BEGINS, 0))
        for tensor in unasked:
            value = sim.graph.saved[tensor].value
            self.left[value] = self.left.get(value, 0) + 1
            if sim.release_event[tensor] < sim.end:
                events.append((sim.release_event[tensor], RELEASED, tensor))
        events += [(until, UNREPLAYED, index) for index, until in self.idle.items() if until < sim.end]
        events.sort()
        left, handed, cached = self.left, self.handed, self.cached
        value_of, moving = sim.value_of_saved, bool(sim.moved)
        for event, kind, tensor in events:
            self.turn += 1
            before = self.live
            if kind == DONE:
                value = value_of[tensor]
                handed[value] -= 1
                if not handed[value] and not left[value]:
                    self._drop(value)
            elif kind == UNPACKED:
                value = value_of[tensor]
                if value not in cached:
                    self._bring(value, event, left, cached)
                    if moving:
                        self._fetch_ahead(event)
                left[value] -= 1
                handed[value] = handed.get(value, 0) + 1
            elif kind == UNPACKED_AGAIN:
                self._again(value_of[tensor], event)
            elif kind == BACKWARD_BEGINS:
                self._fetch_ahead(event)
            else:
                for u in (value_of[tensor],) if kind == RELEASED else self.operations[tensor].reads:
                    if not self.flags[u]:
                        left[u] -= 1
                        self._drop(u)
            if self.live != before:
                self.level.append((event, self.live - before))
            if self.seen is not None:
                self.seen.append(Held(event, -1, frozenset(cached), self.live, 0))

    def _needed(self, value: int, cached: set[int]) -> list[int]:
        flags = self.flags
        needed = replay_set([value], self.sim.producer, self.reads, lambda u: flags[u] or u in cached)
        return sorted(needed, key=self.sim.place) if self.sim.moved else sorted(needed)

    def _early_bytes(self, value: int) -> int:
        """What fetching a value ahead allocates."""
        moved = self.sim.moved[value]
        if self.sim.slab:
            return 0 if moved.tier else moved.gather_bytes
        return moved.ahead_bytes

    def _fetch_ahead(self, event: int) -> None:
        """Start fetching what comes next while there is room in the window."""
        sim, asked = self.sim, []
        if event < sim.first_unpack:
            return
        self.turn += 1
        room = sim.window_bytes - sum(self.early.values())
        while self.next < len(self.ahead):
            value = self.ahead[self.next]
            size = sim.moved[value].ahead_bytes
            if value not in self.fetched:
                if size > room:
                    break
                room -= size
                self.early[value] = size
                self.live += self._early_bytes(value)
                if sim.slab and size:
                    self._begins(value, ahead=True)
                asked.append(value)
            self.next += 1
        if asked:
            self.work.append((event, [], asked))

    def _bring(
        self, value: int, event: int, left: dict[int, int], cached: set[int], again: bool = False
    ) -> None:
        """Run what ``value`` needs, in forward order, counting readers in ``left`` and caching in ``cached``.
        What comes ``again`` has memory of its own."""
        sim, flags = self.sim, self.flags
        sizes, previous = sim.value_bytes if again else self.sizes, sim.previous
        slab = sim.slab and not again
        live = self.live
        most, most_op = -1, -1
        operations, reads, count = self.operations, self.reads, len(sim.graph.operations)
        needed = self._needed(value, cached)
        if sim.moved:
            self.work.append((event, needed, []))
        for index in needed:
            op = operations[index]
            moved: set[int] = set()
            scratch = op.scratch_bytes
            self.turn += 1
            if index >= count:
                brought = op.writes[0]
                self.fetched.append(brought)
                if self.early.pop(brought, 0):
                    live -= self._early_bytes(brought)
                if slab:
                    self._begins(brought, ahead=False)
                elif again and sim.slab:
                    scratch += sim.moved[brought].arriving_bytes
            for w in op.writes:
                old = previous[w]
                if (
                    old >= 0
                    and old in op.reads
                    and old in cached
                    and left[old] == 1
                    and not self.handed.get(old, 0)
                ):
                    moved.add(old)
                    if slab and old in self.place_of:
                        self.place_of[w], self.sizes[w] = self.place_of.pop(old), 0
                else:
                    live += sizes[w]
            if live + scratch > most:
                most, most_op = live + scratch, index
            if self.seen is not None:
                alive = frozenset(cached).difference(moved).union(op.writes)
                self.seen.append(Held(event, index, alive, live, scratch))
            for w in op.writes:
                if not flags[w] and left.get(w, 0) > 0:
                    cached.add(w)
                else:
                    live -= sizes[w]
                    if slab:
                        self._ends(w)
            for u in reads[index]:
                if flags[u]:
                    continue
                left[u] -= 1
                if u in moved:
                    cached.discard(u)
                elif not left[u] and u in cached and not self.handed.get(u, 0):
                    cached.discard(u)
                    live -= sizes[u]
                    if slab:
                        self._ends(u)
        self.live = live
        self.tops.append((event, most, most_op))

    def _drop(self, value: int) -> None:
        if value in self.cached and not self.left[value] and not self.handed.get(value, 0):
            self.cached.discard(value)
            self.live -= self.sizes[value]
            self._ends(value)

    def _again(self, value: int, event: int) -> None:
        """Rule 10: a later unpack of the same saved tensor runs an uncached replay, or takes the copy that is
        still cached.
        """
        before = self.live
        if value in self.cached:
            return
        needed = self._needed(value, self.cached)
        left: dict[int, int] = {value: 1}
        for index in needed:
            for u in self.operations[index].reads:
                if not self.flags[u]:
                    left[u] = left.get(u, 0) + 1
        for u in self.cached:
            if u in left:
                left[u] += 1
        self.repeats += needed
        self._bring(value, event, left, set(self.cached), again=True)
        self.live = before
