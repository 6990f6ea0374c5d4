"""The bound's linear program for steps in which values may also move.

To the program of `lowtide.plan.bound` come, for every value v and every way k in which it may move
(`lowtide.plan.moves.placements`), m_vk in [0, 1], and two columns for waiting. A value that moves may be
unpacked and, where its codec allows, replayed from:

    s_v + r_prod(v) + sum over k of m_vk          >= 1        for every saved value v that backward unpacks
    s_u + r_prod(u) + sum over k of m_uk - r_i    >= 0        for every operation i and every value u that it
    reads

What waits encoded or cut on the device takes its bytes from the operation that made it to its last unpack;
copies under way are left out. Moving costs encoding, decoding, the executor's own time, and the share of a
transfer that it takes from the operations beside it. The rest of a transfer hides behind what runs meanwhile,
as far as there is time. For every tier, writes may begin when their values are there and have to end before
backward asks for anything; reads begin then and have to end before their values are asked for:

    sum of writes of values born at event e or later  <=  seconds from e to backward's first unpack + encoding
    + wait_out sum of reads of values asked for by event e       <=  seconds from there to e + replays that
    can be asked for by e + wait_in

In whatever order an executor transfers, it obeys these, so the bound covers all that moves in the ways that
were offered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lowtide.plan.bound.program import Floats, Program
from lowtide.plan.bound.relaxation import Relaxation
from lowtide.plan.data import Compress, Links, Moved, Shard, stages
from lowtide.plan.moves.placements import Placements
from lowtide.plan.simulate.simulator import Simulator
from lowtide.plan.split.stages import Stages

_ROWS_PER_LINK = 24


class MovingRelaxation(Relaxation):
    """The linear program of one step graph whose values may move.

    Args:
        sim: the step.
        ways: the ways in which values may move.
        links: speeds of tiers and groups.
        cut: the step's stages, where they are known.
        replayable_from: whether a replay may start from a value that waits in a codec of that name.
    """

    def __init__(
        self,
        sim: Simulator,
        ways: Placements,
        links: Links,
        cut: Stages | None = None,
        replayable_from: Callable[[str], bool] = lambda codec: True,
    ) -> None:
        super().__init__(sim, cut)
        self.links = links
        self.rows = [m for v in self.demanded for m in ways.get(v, ())]
        start = len(self.values) + len(self.operations) + len(self.extras)
        self.first_move = start
        self.move_columns: dict[int, list[tuple[int, bool]]] = {}
        """value -> its columns, and whether replays may start from what comes back"""
        for k, m in enumerate(self.rows):
            first, _ = stages(m.decision)
            whole = not isinstance(first, Compress) or replayable_from(first.codec)
            self.move_columns.setdefault(m.value, []).append((start + k, whole))
        self.asked = {
            v: min(start for t in sim.saved_of[v] for start, _ in sim.unpacks[t]) for v in self.demanded
        }
        self.moved: Floats = np.zeros(len(self.rows))
        """the latest answer's decisions to move, a number for each of `rows`"""

    def moves_of(self, value: int, replayed_from: bool = False) -> list[tuple[int, float]]:
        """Entries that are -1 when ``value`` waits elsewhere (so that a replay may read it)."""
        return [
            (column, -1.0) for column, whole in self.move_columns.get(value, ()) if whole or not replayed_from
        ]

    def whole_columns(self) -> Sequence[int]:
        """The columns that are decisions."""
        return [*super().whole_columns(), *range(self.first_move, self.first_move + len(self.rows))]

    def keep_answer(self, point: Floats) -> Floats:
        """Of an answer, the decisions to store and to run again; those to move go to `moved`."""
        self.moved = point[self.first_move : self.first_move + len(self.rows)]
        if len(self.moved) < len(self.rows):
            self.moved = np.zeros(len(self.rows))
        return super().keep_answer(point)

    def seconds_to_move(self, m: Moved) -> float:
        """What moving takes from the device, whatever it hides behind."""
        link = self.links.get(m.tier) if m.tier else None
        busy = (
            link.busy * m.encoded_bytes * (1 / link.write_bytes_per_second + 1 / link.read_bytes_per_second)
            if link
            else 0.0
        )
        return m.encode_seconds + m.decode_seconds + self.sim.graph.replay_overhead_seconds + busy

    def base_program(self) -> Program:
        """Columns and rows without memory."""
        program = super().base_program()
        for m in self.rows:
            program.column(self.seconds_to_move(m))
        if any(m.tier or isinstance(stages(m.decision)[0], Shard) for m in self.rows):
            self._add_transfers(program)
        return program

    def _clock(self) -> Floats:
        """Seconds of the plain step after every event."""
        graph = self.sim.graph
        return np.cumsum(
            [graph.operations[index].seconds if kind == "op" else 0.0 for kind, index in graph.events]
        )

    def _add_transfers(self, program: Program) -> None:
        sim, graph = self.sim, self.sim.graph
        clock = self._clock()
        turn = min(sim.first_unpack, sim.end - 1)
        unit = max(graph.plain_seconds, 1e-9, *(self._longest_transfer(m) for m in self.rows))
        wait_out, wait_in = program.column(unit, np.inf), program.column(unit, np.inf)
        encoding = [
            (self.first_move + k, -m.encode_seconds / unit)
            for k, m in enumerate(self.rows)
            if m.encode_seconds
        ]
        decoding = [
            (self.first_move + k, -m.decode_seconds / unit)
            for k, m in enumerate(self.rows)
            if m.decode_seconds
        ]
        replays = self._replays_by()
        for name in dict.fromkeys(
            n for m in self.rows for n in (m.tier, _way_in(m)) if n and n in self.links
        ):
            link = self.links[name]
            out = [
                (sim.op_event[sim.producer[m.value]], k) for k, m in enumerate(self.rows) if m.tier == name
            ]
            for event in _some({e for e, _ in out}):
                entries = [
                    (
                        self.first_move + k,
                        (link.latency_seconds + self.rows[k].encoded_bytes / link.write_bytes_per_second)
                        / unit,
                    )
                    for e, k in out
                    if e >= event
                ]
                program.row([*entries, *encoding, (wait_out, -1.0)], float(clock[turn] - clock[event]) / unit)
            back = [(self.asked[m.value], k) for k, m in enumerate(self.rows) if _way_in(m) == name]
            for event in _some({e for e, _ in back}):
                entries = [
                    (
                        self.first_move + k,
                        (link.latency_seconds + _bytes_in(self.rows[k]) / link.read_bytes_per_second) / unit,
                    )
                    for e, k in back
                    if e <= event
                ]
                meanwhile = [
                    (self.op_column[i], -graph.operations[i].seconds / unit)
                    for i, e in replays.items()
                    if e <= event
                ]
                program.row(
                    [*entries, *meanwhile, *decoding, (wait_in, -1.0)],
                    float(clock[event] - clock[turn]) / unit,
                )

    def _longest_transfer(self, m: Moved) -> float:
        """Seconds of moving a value out or in, whichever takes longer."""
        out, back = self.links.get(m.tier), self.links.get(_way_in(m))
        there = m.encoded_bytes / out.write_bytes_per_second if out else 0.0
        return max(there, _bytes_in(m) / back.read_bytes_per_second if back else 0.0)

    def _replays_by(self) -> dict[int, int]:
        """Operation -> the first event at which its running again can be asked for."""
        sim = self.sim
        wanted: dict[int, int] = {v: self.asked[v] for v in self.demanded}
        found: dict[int, int] = {}
        for i in reversed(self.operations):
            op = sim.graph.operations[i]
            found[i] = min((wanted.get(w, sim.end) for w in op.writes), default=sim.end)
            for u in op.reads:
                wanted[u] = min(wanted.get(u, sim.end), found[i])
        return found

    def _stays(self, m: Moved) -> tuple[int, int] | None:
        """The events between which what is stored of a moved value takes memory on the device for certain."""
        if m.tier:
            return None
        return self.sim.op_event[self.sim.producer[m.value]], self.sim.last_unpack[m.value]

    def occupancy(self, point: Floats) -> Floats:
        """Bytes of stored and encoded values at every event."""
        found = super().occupancy(point)
        if len(point) < self.first_move + len(self.rows):
            return found
        change = np.zeros(self.sim.end + 1)
        for k, m in enumerate(self.rows):
            amount, span = point[self.first_move + k], self._stays(m)
            if span is not None and amount > 1e-9:
                change[span[0]] += amount * m.encoded_bytes
                change[span[1]] -= amount * m.encoded_bytes
        return found + np.cumsum(change[:-1])

    def held_at(self, event: int, without: set[int] | None = None) -> list[tuple[int, float]]:
        """Entries of the stored and encoded values that take memory at ``event``."""
        entries = super().held_at(event, without)
        for k, m in enumerate(self.rows):
            span = self._stays(m)
            if span is not None and span[0] <= event < span[1]:
                entries.append((self.first_move + k, float(m.encoded_bytes)))
        return entries

    def forced(self) -> Floats:
        """The least share of every value's bytes that each schedule stores."""
        least = super().forced()
        for m in self.rows:
            column = self.column[m.value]
            share = 0.0 if m.tier else m.encoded_bytes / max(1, m.bytes)
            least[column] = min(least[column], share)
        return least


def _way_in(m: Moved) -> str:
    """The link over which a value comes back ahead of need."""
    first, then = stages(m.decision)
    return m.tier if then is not None else first.group if isinstance(first, Shard) else ""


def _bytes_in(m: Moved) -> int:
    """What comes back over it."""
    return m.encoded_bytes if m.tier else m.bytes


def _some(events: set[int]) -> list[int]:
    """At most a few of them, evenly."""
    ordered = sorted(events)
    every = -(-len(ordered) // _ROWS_PER_LINK) or 1
    return ordered[::every]
