"""One stage's backward in the bound's linear program, a backward node at a time.

The window of a stage is split into backward nodes: a batch of unpacks and what runs until the next. Because
an operation runs again at most once, it has run again by node g (a_i,g = 1) or not, and its results wait for
their last reader:

    a_i,g-1 <= a_i,g <= r_i               g = 0: before the window
    a_i,g <= s_u + a_prod(u),g            for what operation i reads (of other stages: s_u + r_prod(u))
    s_v + a_prod(v),g >= 1                for what node g unpacks
    there_v,g >= s_v + a_prod(v),g        until the last unpack of v; two rows, s_v and a_prod(v),g, where the
                                          operation has several outputs
    there_u,g >= s_u + a_prod(u),g + r_i - a_i,g - 1     for a reader i that has yet to run

The memory row of the node's worst moment counts there in place of s. A value that is replayed for one node
and read by a later one takes memory at the moments between: that is what the plain relaxation does not see.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from lowtide.plan.bound.columns import Columns
from lowtide.plan.bound.program import Program

_DEPTH = 1
"""Stages before a window's own whose operations it follows, too."""


class Window:
    """The backward of stage ``stage``, with ``held`` bytes at each event in every schedule."""

    def __init__(self, columns: Columns, held: np.ndarray, stage: int) -> None:
        self.decisions = columns
        self.stage = stage
        self.again: dict[int, list[int]] = {}
        sim = columns.sim
        start, end = columns.stages.window_events[stage]
        self.operations = [
            i for i in columns.stages.operations(max(0, stage - _DEPTH), stage + 1) if i in columns.op_column
        ]
        inside = set(self.operations)
        self.values = [
            v
            for v in columns.values
            if sim.producer[v] in inside
            and sim.natural_end[sim.storage_of[v]] <= start
            and columns.replay_column(v) is not None
        ]
        self.nodes = self._backward_nodes(start, end, held)

    @property
    def columns(self) -> int:
        """About how many columns it takes."""
        return (len(self.operations) + len(self.values)) * (len(self.nodes) + 1)

    def _backward_nodes(self, start: int, end: int, held: np.ndarray) -> list[tuple[int, set[int]]]:
        """For each: the event with the most fixed bytes, and the values of the stage that it unpacks."""
        graph, mine = self.decisions.sim.graph, set(self.values)
        cuts, ran = [start], False
        for at in range(start, end):
            kind = graph.events[at].kind
            if kind == "unpack" and ran:
                cuts.append(at)
            ran = kind == "op" or (ran and kind != "unpack")
        nodes: list[tuple[int, set[int]]] = []
        for first, until in pairwise([*cuts, end]):
            unpacked = (graph.saved[k] for kind, k in graph.events[first:until] if kind == "unpack")
            demanded = {tensor.value for tensor in unpacked if tensor.droppable}
            nodes.append((first + int(held[first:until].argmax()), demanded & mine))
        return nodes

    def add(self, program: Program, others: Iterable[Window]) -> list[tuple[int, list[tuple[int, float]]]]:
        """Put this window's columns and rows into the program, beside the ``others`` already in it; returns
        moments and the entries that take memory at each.
        """
        decisions = self.decisions
        sim = decisions.sim
        count = len(self.nodes)
        again = {i: [program.column() for _ in range(count + 1)] for i in self.operations}
        self.again = again
        mine = set(self.values)
        for other in others:
            # Backward comes to the later stage first: what has run again by the end of one window has before
            # the other.
            sooner, later = (self, other) if self.stage > other.stage else (other, self)
            for i in sooner.again.keys() & later.again.keys():
                program.row([(sooner.again[i][-1], 1.0), (later.again[i][0], -1.0)], 0.0)
        for i in self.operations:
            for g in range(count):
                program.row([(again[i][g], 1.0), (again[i][g + 1], -1.0)], 0.0)
            program.row([(again[i][count], 1.0), (decisions.op_column[i], -1.0)], 0.0)
            for u in sim.reads[i]:
                if u in mine:
                    for g in range(count + 1):
                        there = [*self._stored(u, -1.0), *decisions.moves_of(u, replayed_from=True)]
                        program.row([(again[i][g], 1.0), *there, (again[sim.producer[u]][g], -1.0)], 0.0)
                else:
                    program.row([(again[i][count], 1.0), *decisions.available(u)], 0.0)
        memory: list[list[tuple[int, float]]] = [decisions.held_at(moment, mine) for moment, _ in self.nodes]
        for v in self.values:
            self._add_value(v, program, memory)
        return [(moment, entries) for (moment, _), entries in zip(self.nodes, memory, strict=True)]

    def _stored(self, value: int, factor: float) -> list[tuple[int, float]]:
        """Entry of s_v where ``value`` can be stored for replays."""
        return [(self.decisions.column[value], factor)] if self.decisions.sim.storable[value] else []

    def _add_value(self, v: int, program: Program, memory: list[list[tuple[int, float]]]) -> None:
        """Where ``v`` is demanded and where it waits."""
        decisions, again = self.decisions, self.again
        graph, sim = decisions.sim.graph, decisions.sim
        p = sim.producer[v]
        own = [(decisions.column[v], 1.0)] if graph.values[v].storable or v in sim.saved_of else []
        alone = sum(1 for w in graph.operations[p].writes if w in decisions.column) == 1
        last = sim.last_unpack.get(v, -1)
        size = float(sim.value_bytes[v])
        readers = [i for i in sim.readers[v] if i in again]
        for g, (moment, demanded) in enumerate(self.nodes, start=1):
            if v in demanded:
                program.row([*((c, -x) for c, x in own), (again[p][g], -1.0), *decisions.moves_of(v)], -1.0)
            if any(a <= moment < b for a, b in decisions.handed[v]):
                continue
            if moment < last:
                # An overwritten version that is kept lies in the block of the last version, which counts it.
                if not graph.values[v].storable:
                    memory[g - 1].append((again[p][g], size))
                    continue
                if alone:
                    memory[g - 1] += [(c, x * size) for c, x in own] + [(again[p][g], size)]
                    continue
                there = program.column()
                program.row([(again[p][g], 1.0), (there, -1.0)], 0.0)
                if own:
                    program.row([*own, (there, -1.0)], 0.0)
                memory[g - 1].append((there, size))
            elif readers and last < 0:
                there = program.column()
                stored = self._stored(v, 1.0) if alone else []
                if v in decisions.span and moment < decisions.span[v][1]:
                    program.row([*self._stored(v, 1.0), (there, -1.0)], 0.0)
                for i in readers:
                    program.row(
                        [
                            *stored,
                            (again[p][g], 1.0),
                            (decisions.op_column[i], 1.0),
                            (again[i][g], -1.0),
                            (there, -1.0),
                        ],
                        1.0,
                    )
                memory[g - 1].append((there, size))
