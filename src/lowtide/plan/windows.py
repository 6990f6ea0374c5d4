"""One stage's backward in the bound's linear program, a backward node at a time.

The window of a stage is split into granules: a batch of unpacks and what runs until the next. Between two granules' moments an operation of
the stage runs again (a) or not, and at each moment a value of the stage is there (y) or not:

    y_v,0 <= s_v + e_prod(v)                 before the window: stored, or replayed ahead of it
    y_v,g <= y_v,g-1 + a_prod(v),g           there because it was there, or was replayed since
    y_v,g-1 + a_prod(v),g >= 1               for what granule g unpacks
    a_i,g <= y_u,g-1 + a_prod(u),g           for what operation i reads (values of other stages: stored or replayed at all)
    r_i <= t_i,  t_i >= e_i + sum of a_i,g   t_i is how often operation i runs, which is what costs
    y_v,g >= s_v                             until the last unpack of v: a stored value stays

and the memory row of the granule's worst moment counts y in place of s. A value that is replayed for one granule and wanted by a later one
either takes memory at the moments between or costs a second replay: that is what the plain relaxation does not see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.plan.bound import Program, Relaxation


class Window:
    """The backward of stage ``stage``."""

    def __init__(self, relaxation: Relaxation, stage: int) -> None:
        self.relaxation = relaxation
        sim = relaxation.sim
        start, end = relaxation.stages.window_events[stage]
        self.operations = [i for i in relaxation.stages.operations(stage, stage + 1) if i in relaxation.op_column]
        inside = set(self.operations)
        self.values = [
            v for v in relaxation.values if sim.producer[v] in inside and sim.natural_end[sim.storage_of[v]] <= start and relaxation.replay_column(v) is not None
        ]
        self.granules = self._granules(start, end)

    def _granules(self, start: int, end: int) -> list[tuple[int, set[int]]]:
        """Per granule: the event with the most fixed bytes, and the values of the stage that it unpacks."""
        sim = self.relaxation.sim
        events = sim.graph.events
        mine = set(self.values)
        granules: list[tuple[int, set[int]]] = []
        demanded: set[int] = set()
        first = start
        ran = False
        fixed = self.relaxation.fixed

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

    def add(self, program: Program, budget: int, scale: float) -> None:
        """Put this window's columns and rows into ``program``."""
        rel = self.relaxation
        sim = rel.sim
        graph = sim.graph
        count = len(self.granules)
        early = {i: program.column() for i in self.operations}
        runs = {i: [program.column() for _ in range(count)] for i in self.operations}
        there = {v: [program.column() for _ in range(count + 1)] for v in self.values}
        for i in self.operations:
            # What costs is how often the operation runs, no longer whether it does.
            total = program.column(rel.seconds_of(i), 1.0)
            program.cost[rel.op_column[i]] = 0.0
            program.row([(early[i], 1.0), *((c, 1.0) for c in runs[i]), (total, -1.0)], 0.0)
            program.row([(rel.op_column[i], 1.0), (total, -1.0)], 0.0)
            program.row([(early[i], 1.0), (rel.op_column[i], -1.0)], 0.0)
            for g in range(count):
                program.row([(runs[i][g], 1.0), (rel.op_column[i], -1.0)], 0.0)
        for v in self.values:
            column = rel.column[v]
            p = sim.producer[v]
            storable = graph.values[v].storable or v in sim.saved_of
            program.row([(there[v][0], 1.0), (early[p], -1.0), *([(column, -1.0)] if storable else [])], 0.0)
            last = max((start for t in sim.saved_of.get(v, ()) for start, _ in sim.unpacks[t]), default=-1)
            for g, (moment, demanded) in enumerate(self.granules):
                program.row([(there[v][g + 1], 1.0), (there[v][g], -1.0), (runs[p][g], -1.0)], 0.0)
                if v in demanded:
                    program.row([(there[v][g], -1.0), (runs[p][g], -1.0)], -1.0)
                if storable and moment < last:
                    program.row([(column, 1.0), (there[v][g + 1], -1.0)], 0.0)
        for i in self.operations:
            for u in graph.operations[i].reads:
                if sim.base_flags[u]:
                    continue
                for g in range(count):
                    if u in there:
                        program.row([(runs[i][g], 1.0), (there[u][g], -1.0), (runs[sim.producer[u]][g], -1.0)], 0.0)
                    else:
                        program.row([(runs[i][g], 1.0), *rel.available(u)], 0.0)
        mine = set(self.values)
        for g, (moment, _) in enumerate(self.granules):
            entries = [(c, b / scale) for c, b in rel.held_at(moment, mine)]
            for v in self.values:
                if not any(a <= moment < b for a, b in rel.handed[v]):
                    entries.append((there[v][g + 1], sim.value_bytes[v] / scale))
            program.row(entries, (budget - float(rel.fixed[moment])) / scale)
