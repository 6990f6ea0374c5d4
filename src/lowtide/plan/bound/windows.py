"""One stage's backward in the bound's linear program, a backward node at a time.

The window of a stage is split into granules: a batch of unpacks and what runs until the next. Because an
operation runs again at most once, it has run again by granule g (a_i,g = 1) or not, and what it brought back
waits for whoever still wants it:

    a_i,g-1 <= a_i,g <= r_i                  g = 0 stands for before the window
    a_i,g <= s_u + a_prod(u),g               for what operation i reads (values of other stages: s_u +
    r_prod(u)) s_v + a_prod(v),g >= 1                   for what granule g unpacks
    there_v,g >= s_v + a_prod(v),g           until the last unpack of v (s_v or a, where the operation has
    several outputs) there_u,g >= s_u + a_prod(u),g + r_i - a_i,g - 1      for a reader i that has yet to run

and the memory row of the granule's worst moment counts what is there in place of what is stored. A value that
is replayed for one granule and wanted by a later one takes memory at the moments between: that is what the
plain relaxation does not see.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.plan.bound.relaxation import Relaxation

_DEPTH = 1
"""Stages before a window's own whose operations it follows, too."""


class Window:
    """The backward of stage ``stage``."""

    def __init__(self, relaxation: Relaxation, stage: int) -> None:
        self.relaxation = relaxation
        self.stage = stage
        self.again: dict[int, list[int]] = {}
        sim = relaxation.sim
        start, end = relaxation.stages.window_events[stage]
        self.operations = [
            i
            for i in relaxation.stages.operations(max(0, stage - _DEPTH), stage + 1)
            if i in relaxation.op_column
        ]
        inside = set(self.operations)
        self.values = [
            v
            for v in relaxation.values
            if sim.producer[v] in inside
            and sim.natural_end[sim.storage_of[v]] <= start
            and relaxation.replay_column(v) is not None
        ]
        self.granules = self._granules(start, end)

    @property
    def columns(self) -> int:
        """About how many columns it takes."""
        return (len(self.operations) + len(self.values)) * (len(self.granules) + 1)

    def _granules(self, start: int, end: int) -> list[tuple[int, set[int]]]:
        """Per granule: the event with the most fixed bytes, and the values of the stage that it unpacks."""
        sim = self.relaxation.sim
        events = sim.graph.events
        mine = set(self.values)
        granules: list[tuple[int, set[int]]] = []
        demanded: set[int] = set()
        first = start
        ran = False
        fixed = self.relaxation.standing

        def close(until: int) -> None:
            if first < until:
                worst = first + int(fixed[first:until].argmax())
                granules.append((worst, set(demanded)))

        for at in range(start, end):
            kind, index = events[at]
            if kind == "unpack":
                if ran:
                    close(at)
                    demanded, first, ran = set(), at, False
                value = sim.graph.saved[index].value
                if value in mine and sim.graph.saved[index].droppable:
                    demanded.add(value)
            elif kind == "op":
                ran = True
        close(end)
        return granules

    def add(self, budget: int, others: Iterable[Window]) -> None:
        """Put this window's columns and rows into the program; ``others`` are the windows that are there."""
        rel, program = self.relaxation, self.relaxation.program
        sim = rel.sim
        count = len(self.granules)
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
            program.row([(again[i][count], 1.0), (rel.op_column[i], -1.0)], 0.0)
            for u in sim.reads[i]:
                if u in mine:
                    for g in range(count + 1):
                        there = [*self._stored(u, -1.0), *rel.moves_of(u, replayed_from=True)]
                        program.row([(again[i][g], 1.0), *there, (again[sim.producer[u]][g], -1.0)], 0.0)
                else:
                    program.row([(again[i][count], 1.0), *rel.available(u)], 0.0)
        memory: list[list[tuple[int, float]]] = [rel.held_at(moment, mine) for moment, _ in self.granules]
        for v in self.values:
            self._add_value(v, memory)
        for (moment, _), entries in zip(self.granules, memory, strict=True):
            rel.add_moment(moment, entries, budget)

    def _stored(self, value: int, factor: float) -> list[tuple[int, float]]:
        """Entry of s_v where ``value`` can be stored for replays."""
        return (
            [(self.relaxation.column[value], factor)]
            if self.relaxation.sim.graph.values[value].storable
            else []
        )

    def _add_value(self, v: int, memory: list[list[tuple[int, float]]]) -> None:
        """Where ``v`` is demanded and where it waits."""
        rel, program, again = self.relaxation, self.relaxation.program, self.again
        graph, sim = rel.sim.graph, rel.sim
        p = sim.producer[v]
        own = [(rel.column[v], 1.0)] if graph.values[v].storable or v in sim.saved_of else []
        alone = sum(1 for w in graph.operations[p].writes if w in rel.column) == 1
        last = sim.last_unpack.get(v, -1)
        size = float(sim.value_bytes[v])
        readers = [i for i in sim.readers[v] if i in again]
        for g, (moment, demanded) in enumerate(self.granules, start=1):
            if v in demanded:
                program.row([*((c, -x) for c, x in own), (again[p][g], -1.0), *rel.moves_of(v)], -1.0)
            if any(a <= moment < b for a, b in rel.handed[v]):
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
                if v in rel.span and moment < rel.span[v][1]:
                    program.row([*self._stored(v, 1.0), (there, -1.0)], 0.0)
                for i in readers:
                    program.row(
                        [
                            *stored,
                            (again[p][g], 1.0),
                            (rel.op_column[i], 1.0),
                            (again[i][g], -1.0),
                            (there, -1.0),
                        ],
                        1.0,
                    )
                memory[g - 1].append((there, size))
