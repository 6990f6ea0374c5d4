"""Values that move: which of their bytes are where when, and what waiting for transfers takes.

The rules, which the executor (`lowtide.extensions.moves.engine`) follows to the letter:

1. A moved value is encoded (or cut into shards) and its copy out is started right after the operation that
  wrote it.
2. Copies out finish in order. When more than the window's bytes wait for theirs, the executor waits for the
   oldest until they fit, and lets go of what it held for them; whatever is left is waited for when backward
   asks for its first saved tensor.
3. In backward a moved value is an operation without inputs: it runs when somebody needs the value, and the
   result is shared and freed like any replayed value (rules 8 to 10 of docs/design.md).
4. After backward's first unpack, and after each replay, the moved values that will be asked for next are
   fetched ahead, in the predicted order, while what was fetched and is not in use yet fits the window.
5. What is stored of a value is kept until the last saved tensor that rests on it is released.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.errors import PlanError
from lowtide.graph import Operation, StepGraph
from lowtide.plan.data import Links, Move, Plan
from lowtide.plan.simulate.index import Bytes, Happening, Sources, StepIndex
from lowtide.plan.simulate.simulator import Simulation, Simulator
from lowtide.plan.simulate.walk import LiveCopies, Walk


@dataclass(frozen=True)
class Transfers:
    """What transfers do to a step.

    Attributes:
        seconds: what waiting, encoding and crowding add to it (decoding is counted with the replays).
        crowding_seconds: what of that transfers take from the operations that run beside them (`Link.busy`).
        order: moved values in the order in which they are fetched.
        lifetimes: moved value -> half-open lifetime of what is stored, in events.
        spans: (moved value, whether it is the encoded form on its way in) -> half-open lifetime in turns of
            the backward, where a slab holds them.
        waits: (``"forward"`` or ``"backward"``, module) -> seconds for which the step waits for a link there.
    """

    seconds: float
    crowding_seconds: float
    order: list[int]
    lifetimes: dict[int, tuple[int, int]] = field(repr=False)
    spans: dict[tuple[int, bool], tuple[int, int]] = field(default_factory=dict, repr=False)
    waits: dict[tuple[str, str], float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class Moved:
    """The values of a step that move, and how; what `lowtide.plan.simulate.index.Moving` is about.

    Attributes:
        moved: value -> the value's move.
        window_bytes: the most bytes that wait for their copy out at one time, and the most that are fetched
            ahead.
        own: how many operations the step has; the fetches are numbered behind them.
        made: of each value that moves, the operation that made it in the forward.
        slab: whether fetched values lie in a slab, and take no memory of their own.
        links: how fast tiers and groups are; without it transfers take no time.
    """

    moved: Mapping[int, Move]
    window_bytes: int
    own: int
    made: Sequence[int]
    slab: bool = False
    links: Links | None = None

    def place(self, operation: int) -> float:
        """Where an operation stands in the order of the forward; a value's fetch stands right behind what
        made the value.
        """
        return operation if operation < self.own else self.made[operation - self.own] + 0.5

    def walk(
        self,
        sim: StepIndex,
        sources: Sources,
        flags: bytearray,
        running: list[int],
        happenings: list[Happening],
        seen: list[LiveCopies] | None,
    ) -> MovingWalk:
        """The walk through the step. Who comes first is known after the first walk; the second fetches ahead
        in that order.
        """
        walk = MovingWalk(sim, sources, self, flags, running, (), seen)
        walk.run(happenings)
        if walk.order and self.window_bytes:
            if seen is not None:
                seen.clear()
            walk = MovingWalk(sim, sources, self, flags, running, walk.order, seen)
            walk.run(happenings)
        return walk

    def outgoing(self, sim: StepIndex, sources: Sources, until: dict[int, int]) -> Outgoing:
        """What copies out hold and take."""
        return Outgoing(sim, sources, self, until)


def with_moves(
    sim: StepIndex, moves: Iterable[Move], window_bytes: int, links: Links | None = None, slab: bool = False
) -> Sources:
    """Where evicted values come back from when some move.

    Args:
        sim: of the step.
        moves: of the values that move.
        window_bytes, links, slab: as of `Moved`.
    """
    moved = {m.value: m for m in moves}
    if not moved:
        return sim.sources
    fetches = _fetches(sim.graph, list(moved.values()), slab)
    producer, own = list(sim.producer), len(sim.graph.operations)
    for fetch in fetches:
        producer[fetch.writes[0]] = fetch.index
    nothing = [()] * len(fetches)
    return Sources(
        [*sim.graph.operations, *fetches],
        own,
        producer,
        [*sim.reads, *nothing],
        [*sim.held_reads, *nothing],
        Moved(moved, window_bytes, own, [sim.producer[value] for value in moved], slab, links),
    )


def sources_of(sim: StepIndex, plan: Plan) -> Sources:
    """Where evicted values come back from under a plan."""
    return with_moves(sim, plan.moves, plan.window_bytes, slab=plan.slab_bytes > 0)


def simulate_plan(sim: Simulator, plan: Plan, seen: list[LiveCopies] | None = None) -> Simulation:
    """The step under ``plan``; its slab, if it has one, is left aside.

    Args:
        sim: of the step.
        plan: made for it.
        seen: as of `Simulator.simulate`.
    """
    return sim.simulate(plan.stored, sources_of(sim, plan), seen=seen)


def _fetches(graph: StepGraph, moved: Sequence[Move], slab: bool) -> list[Operation]:
    """The fetches of moved values: operations that write one value and read nothing, numbered behind those of
    the graph. With a slab, encoded forms arrive in the slab.
    """
    return [
        Operation(
            index=len(graph.operations) + k,
            name="fetch",
            reads=(),
            writes=(m.value,),
            phase="forward",
            module=graph.operations[graph.values[m.value].producer or 0].module,
            seconds=m.decode_seconds,
            scratch_bytes=(0 if slab else m.arriving_bytes) + m.codec_scratch_bytes + m.gather_bytes,
        )
        for k, m in enumerate(moved)
    ]


class Places:
    """When each moved value, and its encoded form, takes its place in the slab. Times are turns, which are
    counted up with each thing that happens in the walk.
    """

    def __init__(self, moved: Mapping[int, Move]) -> None:
        self._moved = moved
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


class MovingWalk(Walk):
    """The walk through a step with moved values.

    Args:
        sim, sources, flags, running, seen: as of `Walk`.
        moving: the values that move.
        ahead: these in the order in which they are fetched ahead of need; without it they are fetched when
            they are needed.

    Attributes:
        order: moved values in the order in which they are fetched.
        work: (event, operations that run then, moved values that are asked to be fetched ahead after it), in
            order.
        places: in the slab, where there is one.
    """

    places: Places | None

    def __init__(
        self,
        sim: StepIndex,
        sources: Sources,
        moving: Moved,
        flags: bytearray,
        running: list[int],
        ahead: Iterable[int],
        seen: list[LiveCopies] | None,
    ) -> None:
        super().__init__(sim, sources, flags, running, seen)
        self._moving = moving
        if moving.slab:  # what lies there takes nothing
            self.places, self.sizes = Places(moving.moved), list(sim.value_bytes)
            for value in moving.moved:
                self.sizes[value] = 0
        self._ahead = list(reversed(list(ahead)))
        self._early: dict[int, int] = {}
        """moved value -> bytes that were fetched ahead for it and are not in use yet"""
        self.order: list[int] = []
        self.work: list[tuple[int, list[int], list[int]]] = []

    def run(self, happenings: list[Happening]) -> None:
        """Go through what happens to the copies; fetching ahead begins with the backward."""
        if self.sim.first_unpack < self.sim.end:
            happenings = [*happenings, (self.sim.first_unpack, "begins", -1)]
        super().run(happenings)

    def begins(self, event: int) -> None:
        """The backward begins: fetch ahead."""
        if self.places is not None:
            self.places.turn += 1
        moved, begun = self._moving.moved, list[int]()
        room = self._moving.window_bytes - sum(self._early.values())
        while self._ahead:
            value = self._ahead[-1]
            size = moved[value].ahead_bytes
            if value not in self.order:
                if size > room:
                    break
                room -= size
                self._early[value] = size
                self.live += self._early_bytes(value)
                if self.places is not None and size:
                    self.places.begin(value, ahead=True)
                begun.append(value)
            self._ahead.pop()
        if begun:
            self.work.append((event, [], begun))

    def replay(
        self, needed: list[int], event: int, left: dict[int, int], cached: set[int], again: bool = False
    ) -> None:
        """Run the operations that bring a value back, and fetch ahead what comes next."""
        self.work.append((event, needed, []))
        super().replay(needed, event, left, cached, again)
        if not again:
            self.begins(event)

    def fetched(self, value: int, again: bool) -> tuple[int, int]:
        """A moved value is fetched; see `Walk.fetched`."""
        self.order.append(value)
        early = self._early_bytes(value) if self._early.pop(value, 0) else 0
        if self.places is None:
            return early, 0
        if again:  # not into the slab
            return early, self._moving.moved[value].arriving_bytes
        self.places.begin(value, ahead=False)
        return early, 0

    def _early_bytes(self, value: int) -> int:
        """Bytes that fetching a value ahead allocates."""
        moved = self._moving.moved[value]
        if self._moving.slab:
            return 0 if moved.tier else moved.gather_bytes
        return moved.ahead_bytes


class Outgoing:
    """Rules 1, 2 and 5: what is held for copies that are under way, and what encoded forms take on the
    device.
    """

    def __init__(self, sim: StepIndex, sources: Sources, moving: Moved, until: dict[int, int]) -> None:
        self.sim, self.sources, self.moved, self.links = sim, sources, moving.moved, moving.links or {}
        graph = sim.graph
        self.hold: dict[int, int] = {}
        """storage -> event until which a copy out holds it"""
        self.level: list[tuple[int, int]] = []
        """(event, bytes) changes of what encoded forms take"""
        self.waits: list[tuple[int, int]] = []
        """(event, moved value whose copy is waited for then), in order"""
        self.gone = {v: until[k] for v in self.moved if (k := sources.producer[v]) in until}
        waiting: deque[int] = deque()
        bytes_ = 0
        producer = {v: graph.values[v].producer or 0 for v in self.gone}
        order = sorted(self.gone, key=lambda v: (producer[v], graph.operations[producer[v]].writes.index(v)))
        self.born = {v: sim.op_event[producer[v]] for v in order}
        """moved value -> event at which it is written, in order"""
        for value, at in self.born.items():
            moved = self.moved[value]
            if not moved.tier:
                self.level += [(at, moved.encoded_bytes), (self.gone[value], -moved.encoded_bytes)]
                continue
            waiting.append(value)
            bytes_ += moved.encoded_bytes
            while bytes_ > moving.window_bytes:
                bytes_ -= self._finish(waiting.popleft(), at)
        while waiting:
            if self.born[waiting[0]] > sim.first_unpack:
                raise PlanError(
                    "values that are written after a backward has begun, as in a pipeline's step, "
                    "cannot be moved off the device: choose a policy that recomputes (optimal, full, "
                    "sqrt, selective)"
                )
            self._finish(waiting.popleft(), sim.first_unpack)

    def _finish(self, value: int, event: int) -> int:
        sim, moved = self.sim, self.moved[value]
        self.waits.append((event, value))
        after = min(event + 1, sim.end)
        if moved.encoded:
            self.level += [(self.born[value], moved.encoded_bytes), (after, -moved.encoded_bytes)]
        else:
            sid = sim.storage_of[value]
            self.hold[sid] = max(self.hold.get(sid, 0), after)
        return moved.encoded_bytes

    def scratch(self, plain: Bytes) -> Bytes:
        """The most that is allocated beyond what is live after each event: an operation's scratch is gone
        when its outputs are encoded.
        """
        found = plain.copy()
        by_event: dict[int, list[int]] = {}
        for value, event in self.born.items():
            by_event.setdefault(event, []).append(value)
        for event, values in by_event.items():
            encoded = sum(self.moved[v].encoded_bytes for v in values if self.moved[v].encoded)
            most = max(self.moved[v].codec_scratch_bytes for v in values)
            found[event] = max(0, int(plain[event]) - encoded, most)
        return found

    def transfers(self, walk: MovingWalk) -> Transfers:
        """Walk the step once more with a clock: operations, copies out and copies in."""
        graph = self.sim.graph
        clock = plain = busy = 0.0
        free: dict[tuple[str, str], float] = {}
        ready: dict[int, float] = {}
        waited: defaultdict[tuple[str, str], float] = defaultdict(float)

        def wait(value: int, way: str, module: str) -> None:
            nonlocal clock
            if (late := ready[value] - clock) > 0:
                waited[way, module] += late
                clock = ready[value]

        def start(value: int, way: str) -> None:
            nonlocal busy
            moved = self.moved[value]
            name, bytes_ = moved.tier, moved.encoded_bytes
            if way == "in":
                name, bytes_ = moved.link_in, moved.bytes_in
            if not name:
                ready[value] = clock
                return
            link = self.links.get(name)
            seconds = 0.0
            if link is not None:
                seconds = link.seconds_out(bytes_) if way == "out" else link.seconds_in(bytes_)
                speed = link.write_bytes_per_second if way == "out" else link.read_bytes_per_second
                busy += link.busy * bytes_ / speed if moved.tier else 0.0
            ready[value] = free[name, way] = max(free.get((name, way), 0.0), clock) + seconds

        outs: defaultdict[int, list[int]] = defaultdict(list)
        for value, event in self.born.items():
            outs[event].append(value)
        waits: defaultdict[int, list[int]] = defaultdict(list)
        for event, value in self.waits:
            waits[event].append(value)
        work: defaultdict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
        for event, operations, asked in walk.work:
            work[event].append((operations, asked))
        early: set[int] = set()
        for at, (kind, index) in enumerate(graph.events):
            if kind == "op":
                clock += graph.operations[index].seconds
                plain += graph.operations[index].seconds
            for value in outs.get(at, ()):
                clock += self.moved[value].encode_seconds
                start(value, "out")
            for value in waits.get(at, ()):
                before = kind == "op" and at < self.sim.first_unpack
                module = graph.operations[index].module if kind == "op" else self._module(value)
                wait(value, "forward" if before else "backward", module)
            for operations, asked in work.get(at, ()):
                for op in operations:
                    if op >= len(graph.operations):
                        value = self.sources.operations[op].writes[0]
                        if value in early:
                            early.discard(value)
                        else:
                            start(value, "in")
                        wait(value, "backward", self._module(value))
                    clock += self.sources.operations[op].seconds
                    plain += self.sources.operations[op].seconds
                for value in asked:
                    start(value, "in")
                    early.add(value)
        lifetimes = {v: (born, self.gone[v] + 1) for v, born in self.born.items()}
        spans = walk.places.spans() if walk.places is not None else {}
        order = list(dict.fromkeys(walk.order))
        return Transfers(clock - plain + busy, busy, order, lifetimes, spans, dict(waited))

    def _module(self, value: int) -> str:
        """The module that wrote a value."""
        return self.sim.graph.operations[self.sim.producer[value]].module
