"""What transfers add to the bound's linear program: two columns for waiting, out and in.

A transfer hides behind what runs meanwhile, as far as there is time. For every tier or group, writes may
begin when their values exist and have to end before backward unpacks anything; reads begin then and have to
end before their values are unpacked:

    sum of writes of values born at event e or later  <=  seconds from e to backward's first unpack
        + encoding + wait_out
    sum of reads of values unpacked by event e        <=  seconds from there to e
        + replays that can be needed by e + decoding + wait_in

In whatever order an executor transfers, it obeys these.
"""

from __future__ import annotations

import numpy as np

from lowtide.plan.bound.columns import Columns
from lowtide.plan.bound.program import Program

_ROWS_PER_LINK = 24


def add_waiting(program: Program, columns: Columns) -> None:
    """Add the columns for waiting, and the rows of all links."""
    sim, graph = columns.sim, columns.sim.graph
    asked = {v: min(start for t in sim.saved_of[v] for start, _ in sim.unpacks[t]) for v in columns.demanded}
    transfers: dict[tuple[str, bool], list[tuple[int, int, float]]] = {}
    """(link, whether out) -> event, column and seconds of each transfer"""
    for column, m in enumerate(columns.moves, columns.first_move):
        born = sim.op_event[sim.producer[m.value]]
        if m.tier in columns.links:
            seconds = columns.links[m.tier].seconds_out(m.encoded_bytes)
            transfers.setdefault((m.tier, True), []).append((born, column, seconds))
        if m.link_in in columns.links:
            seconds = columns.links[m.link_in].seconds_in(m.bytes_in)
            transfers.setdefault((m.link_in, False), []).append((asked[m.value], column, seconds))
    if not transfers:
        return
    unit = max(graph.plain_seconds, 1e-9, *(s for rows in transfers.values() for _, _, s in rows))
    wait = {True: program.column(unit, np.inf), False: program.column(unit, np.inf)}
    moves = list(enumerate(columns.moves, columns.first_move))
    coding = {
        True: [(column, -m.encode_seconds / unit) for column, m in moves if m.encode_seconds],
        False: [(column, -m.decode_seconds / unit) for column, m in moves if m.decode_seconds],
    }
    clock = np.cumsum([graph.operations[k].seconds if kind == "op" else 0.0 for kind, k in graph.events])
    turn = clock[min(sim.first_unpack, sim.end - 1)]
    replays = _first_needed(columns, asked)
    for (_, out), rows in transfers.items():
        for event in _some({at for at, _, _ in rows}):
            entries = [(c, s / unit) for at, c, s in rows if (at >= event if out else at <= event)]
            if not out:
                entries += [
                    (columns.op_column[i], -graph.operations[i].seconds / unit)
                    for i, at in replays.items()
                    if at <= event
                ]
            there = float(turn - clock[event] if out else clock[event] - turn)
            program.row([*entries, *coding[out], (wait[out], -1.0)], there / unit)


def _first_needed(columns: Columns, asked: dict[int, int]) -> dict[int, int]:
    """Operation -> the first event at which its replay can be needed."""
    end, wanted = columns.sim.end, dict(asked)
    found: dict[int, int] = {}
    for i in reversed(columns.operations):
        op = columns.sim.graph.operations[i]
        found[i] = min((wanted.get(w, end) for w in op.writes), default=end)
        for u in op.reads:
            wanted[u] = min(wanted.get(u, end), found[i])
    return found


def _some(events: set[int]) -> list[int]:
    """At most a few of them, evenly."""
    ordered = sorted(events)
    return ordered[:: -(-len(ordered) // _ROWS_PER_LINK) or 1]
