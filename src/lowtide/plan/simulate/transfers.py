"""Values that move: which of their bytes are where when, and what waiting for transfers takes.

The rules, which the executor (`lowtide.run.transfers`) follows to the letter:

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
from dataclasses import dataclass, field

from lowtide.errors import PlanError
from lowtide.plan.data import Links
from lowtide.plan.simulate.index import Bytes, Sources, StepIndex
from lowtide.plan.simulate.walk import Walk


@dataclass(frozen=True)
class Transfers:
    """What transfers do to a step.

    Attributes:
        seconds: what waiting, encoding and crowding add to it (decoding is counted with the replays).
        crowding_seconds: what of that transfers take from the operations that run beside them (`Link.busy`).
        order: moved values in the order in which they are fetched.
        lifetimes: moved value -> half-open lifetime of what is stored, in events.
    """

    seconds: float
    crowding_seconds: float
    order: list[int]
    lifetimes: dict[int, tuple[int, int]] = field(repr=False)


class Outgoing:
    """Rules 1, 2 and 5: what is held for copies that are under way, and what encoded forms take on the
    device.
    """

    def __init__(self, sim: StepIndex, sources: Sources, until: dict[int, int]) -> None:
        self.sim, self.moved, self.sources = sim, sources.moved, sources
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
            while bytes_ > sources.window_bytes:
                bytes_ -= self._finish(waiting.popleft(), at)
        while waiting:
            if self.born[waiting[0]] > sim.first_unpack:
                raise PlanError(
                    "what is written after a backward has begun, as in a pipeline's step, cannot be moved "
                    "off the device: choose a policy that recomputes (optimal, full, sqrt, selective)"
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

    def transfers(self, replay: Walk, links: Links | None) -> Transfers:
        """Walk the step once more with a clock: operations, copies out and copies in."""
        graph = self.sim.graph
        clock = plain = busy = 0.0
        free: dict[tuple[str, str], float] = {}
        ready: dict[int, float] = {}
        speeds = links or {}

        def start(value: int, way: str) -> None:
            nonlocal busy
            moved = self.moved[value]
            name, bytes_ = moved.tier, moved.encoded_bytes
            if way == "in":
                name, bytes_ = moved.link_in, moved.bytes_in
            if not name:
                ready[value] = clock
                return
            link = speeds.get(name)
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
        for event, operations, asked in replay.work:
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
                clock = max(clock, ready[value])
            for operations, asked in work.get(at, ()):
                for op in operations:
                    if op >= len(graph.operations):
                        value = self.sources.operations[op].writes[0]
                        if value in early:
                            early.discard(value)
                        else:
                            start(value, "in")
                        clock = max(clock, ready[value])
                    clock += self.sources.operations[op].seconds
                    plain += self.sources.operations[op].seconds
                for value in asked:
                    start(value, "in")
                    early.add(value)
        lifetimes = {v: (born, self.gone[v] + 1) for v, born in self.born.items()}
        return Transfers(clock - plain + busy, busy, list(dict.fromkeys(replay.fetched)), lifetimes)
