"""The lower bound where values may also move: `lowtide.plan.bound` with a column for each way to move.

Every value v and way k (`lowtide.extensions.moves.placements`) has m_vk in [0, 1]. A value that moves may be
unpacked and, where its codec allows, replayed from, so the sum of m_vk over k joins s_v in the first two
rows. Moving costs encoding, decoding, the executor's own time, and what a transfer takes from the operations
beside it. What waits encoded or cut on the device takes its bytes from the operation that made it to its last
unpack; copies under way are left out. Transfers hide behind what runs meanwhile, as far as there is time: for
each tier or group, each direction and some events e,

    sum of writes of values born at e or later  <=  seconds from e to backward + encoding + waiting
    sum of reads of values unpacked by e        <=  seconds of backward to e + replays + decoding + waiting
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from lowtide.plan.bound import Effort, Floats, LinearProgram, Relaxation, Spans
from lowtide.plan.data import Links, Move
from lowtide.plan.simulate.simulator import Simulator

_ROWS_PER_LINK = 8
"""For how many moments the linear program says what hides a link's transfers."""


class MovingRelaxation(Relaxation):
    """The linear program of one step graph whose values may move. Behind the columns of values and operations
    are those of moves, then those of waiting.

    Args:
        sim: the step.
        placements: value -> the ways in which it may move.
        links: speeds of tiers and groups.
        effort: as of `Relaxation`.
        host_bytes: the most that may move to main memory, or ``None``.
    """

    def __init__(
        self,
        sim: Simulator,
        placements: Mapping[int, Sequence[Move]],
        links: Links,
        effort: Effort | None = None,
        host_bytes: int | None = None,
    ) -> None:
        self.links, self._placements, self._host_bytes = links, placements, host_bytes
        super().__init__(sim, effort)

    @cached_property
    def moves(self) -> list[Move]:
        """The ways to move, in the order of their columns."""
        return [m for v in self.demanded for m in self._placements.get(v, ())]

    @cached_property
    def columns(self) -> dict[int, list[tuple[int, Move]]]:
        """Value -> its moves, each with its column."""
        found: dict[int, list[tuple[int, Move]]] = {}
        for column, m in enumerate(self.moves, self.first_move):
            found.setdefault(m.value, []).append((column, m))
        return found

    @property
    def first_move(self) -> int:
        """The first column of a move."""
        return super().count

    @property
    def count(self) -> int:
        return super().count + len(self.moves)

    def seconds_to_move(self, m: Move) -> float:
        """What moving takes from the device, whatever it hides behind."""
        link = self.links.get(m.tier)
        busy = link.busy * link.there_and_back(m.encoded_bytes) if link else 0.0
        return m.encode_seconds + m.decode_seconds + self.sim.graph.replay_overhead_seconds + busy

    def _available(self, value: int) -> list[tuple[int, float]]:
        moved = [(column, -1.0) for column, m in self.columns.get(value, ()) if m.replayable_from]
        return [*super()._available(value), *moved]

    def _demandable(self, value: int) -> list[tuple[int, float]]:
        return [*super()._demandable(value), *((column, -1.0) for column, _ in self.columns.get(value, ()))]

    def _begin(self, budget: int) -> None:
        super()._begin(budget)
        for m in self.moves:
            self.linear_program.column(self.seconds_to_move(m))
        self._add_waiting(self.linear_program)
        if self._host_bytes:
            there = [(c, m) for c, m in enumerate(self.moves, self.first_move) if m.tier == "host"]
            if there:
                self.linear_program.row([(c, m.encoded_bytes / self._host_bytes) for c, m in there], 1.0)

    def _add_waiting(self, program: LinearProgram) -> None:
        """Columns for waiting, and for each link and direction rows that say what hides its transfers: those
        out from an event on hide until backward begins, those in until an event since then.
        """
        sim, graph = self.sim, self.sim.graph
        transfers: dict[tuple[str, bool], list[tuple[int, int, float]]] = {}
        """(link, whether out) -> event, column and seconds of each transfer"""
        for column, m in enumerate(self.moves, self.first_move):
            if m.tier in self.links:
                seconds, born = self.links[m.tier].seconds_out(m.encoded_bytes), sim.producer[m.value]
                transfers.setdefault((m.tier, True), []).append((sim.op_event[born], column, seconds))
            if m.link_in in self.links:
                seconds = self.links[m.link_in].seconds_in(m.bytes_in)
                asked = min(
                    sim.unpacks[tensor][0][0] for tensor in sim.saved_of[m.value] if sim.unpacks[tensor]
                )
                transfers.setdefault((m.link_in, False), []).append((asked, column, seconds))
        if not transfers:
            return
        clock = np.cumsum([graph.operations[k].seconds if kind == "op" else 0.0 for kind, k in graph.events])
        turn = float(clock[min(sim.first_unpack, sim.end - 1)])
        wait = {out: program.column(1.0, np.inf) for out in (True, False)}
        moves = list(enumerate(self.moves, self.first_move))
        again = [(column, graph.operations[i].seconds) for i, column in self.op_column.items()]
        for (_, out), rows in transfers.items():
            coding = [(column, m.encode_seconds if out else m.decode_seconds) for column, m in moves]
            hiding = [*coding, *([] if out else again), (wait[out], 1.0)]
            events = sorted({at for at, _, _ in rows}, reverse=not out)
            for event in events[:: -(-len(events) // _ROWS_PER_LINK)]:
                there = float(turn - clock[event] if out else clock[event] - turn)
                mine = [(column, s) for at, column, s in rows if (at >= event if out else at <= event)]
                unit = max(there, *(seconds for _, seconds in mine), 1e-9)
                entries = [*mine, *((column, -seconds) for column, seconds in hiding)]
                program.row([(column, seconds / unit) for column, seconds in entries], there / unit)

    def _forced_shares(self) -> Floats:
        least = super()._forced_shares()
        for v, rows in self.columns.items():
            shares = [0.0 if m.tier else m.encoded_bytes / max(1, m.bytes) for _, m in rows]
            least[self.column[v]] = min([least[self.column[v]], *shares])
        return least

    def _tabulate(
        self, handed: dict[int, Spans], held_until: dict[int, int]
    ) -> list[tuple[int, int, int, int]]:
        rows, sim = super()._tabulate(handed, held_until), self.sim
        for column, m in enumerate(self.moves, self.first_move):
            if not m.tier:  # it waits encoded, or cut, on the device
                born = sim.op_event[sim.producer[m.value]]
                rows.append((column, born, sim.last_unpack[m.value], m.encoded_bytes))
        return rows
