"""Plans and graphs for other sizes of a step: the same operations on other lengths or batches.

`transfer` carries a plan's decisions over to such a step and simulates them exactly there. `dominates` says
that whatever holds a larger step within a budget holds a smaller one. `interpolate` makes the graph of a
length between those that were traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan.data import Codec, Links, Plan
from lowtide.plan.policies.build import make_plan
from lowtide.plan.simulate.simulator import Simulator

CARRIED = "decisions carried over from a step of another size; no lower bound was computed for this one"
"""A note of plans that `transfer` made."""


def same_program(a: StepGraph, b: StepGraph) -> bool:
    """Whether two steps run the same operations on the same values, whatever their sizes, times and order of
    events.
    """
    return (
        len(a.operations) == len(b.operations)
        and len(a.values) == len(b.values)
        and all(
            x.name == y.name
            and x.reads == y.reads
            and x.writes == y.writes
            and x.phase == y.phase
            and x.random == y.random
            and x.replayable == y.replayable
            for x, y in zip(a.operations, b.operations, strict=True)
        )
        and a.values == b.values
        and [(s.kind, s.producer) for s in a.storages] == [(s.kind, s.producer) for s in b.storages]
        and [(s.value, s.droppable, s.forced) for s in a.saved]
        == [(s.value, s.droppable, s.forced) for s in b.saved]
    )


def transfer(
    plan: Plan,
    made_for: StepGraph,
    graph: StepGraph,
    budget: int | None = None,
    *,
    links: Links | None = None,
    codecs: Sequence[Codec] = (),
    simulator: Simulator | None = None,
) -> Plan | None:
    """The decisions of ``plan`` for another step of the same operations, with the exact peak and the times
    that they have there.

    Args:
        plan: the plan.
        made_for: the step that it was made for.
        graph: the other step.
        budget: the most live bytes allowed there; ``None`` for whatever it comes to.
        links: how fast the tiers are, where values move.
        codecs: codecs of the user's own that the plan names.
        simulator: one that already stands for ``graph``.

    Returns:
        The plan, or ``None`` where the steps do not run the same operations, or the peak is above the budget.
    """
    if not same_program(made_for, graph):
        return None
    try:
        return make_plan(
            graph,
            stored=plan.stored,
            policy=plan.policy,
            budget=budget,
            bound=False,
            notes=(CARRIED,),
            simulator=simulator,
            moves={move.value: move.decision for move in plan.moves},
            window_bytes=plan.window_bytes,
            links=links,
            codecs=codecs,
            slab=bool(plan.slab_bytes) if plan.moves else None,
        )
    except BudgetError:
        return None


def dominates(larger: StepGraph, smaller: StepGraph) -> bool:
    """Whether every plan in which nothing moves has at most the peak in ``smaller`` that it has in
    ``larger``: the same events, and nothing larger.
    """
    return (
        same_program(larger, smaller)
        and larger.events == smaller.events
        and larger.resident_bytes >= smaller.resident_bytes
        and all(x.bytes >= y.bytes for x, y in zip(larger.storages, smaller.storages, strict=True))
        and all(
            x.scratch_bytes >= y.scratch_bytes
            for x, y in zip(larger.operations, smaller.operations, strict=True)
        )
    )


def interpolate(traced: Mapping[int, StepGraph], length: int) -> StepGraph | None:
    """The step at a length between those that were traced, three at least.

    Every size is taken for a straight line, or for a multiple of the square, in the length, and all traced
    steps have to agree on which; with four of them any quadratic will do. Times follow the power law between
    the neighbours. Whether the program takes the same operations at that length is for the executor to see.

    Args:
        traced: length -> the step's graph.
        length: the length.

    Returns:
        The graph, or ``None`` where the graphs differ in more than sizes, do not agree, or do not say.
    """
    if length in traced:
        return traced[length]
    known = sorted(traced)
    if len(known) < 3 or not known[0] < length < known[-1]:
        return None
    graphs = [traced[n] for n in known]
    first = graphs[0]
    if not all(
        same_program(first, g) and g.events == first.events and len(g.withheld) == len(first.withheld)
        for g in graphs[1:]
    ):
        return None
    below = max(k for k, n in enumerate(known) if n < length)
    share = math.log(length / known[below]) / math.log(known[below + 1] / known[below])
    sizes = _Sizes(known, length, below)

    def seconds(found: Iterable[float]) -> float:
        several = tuple(found)
        a, b = several[below], several[below + 1]
        return a * (b / a) ** share if a > 0 and b > 0 else (1 - share) * a + share * b

    try:
        operations = tuple(
            replace(
                like[0],
                seconds=seconds(op.seconds for op in like),
                scratch_bytes=sizes.scratch(op.scratch_bytes for op in like),
                flops=sizes.of(op.flops for op in like),
            )
            for like in zip(*(g.operations for g in graphs), strict=True)
        )
        storages = tuple(
            replace(like[0], bytes=sizes.of(s.bytes for s in like))
            for like in zip(*(g.storages for g in graphs), strict=True)
        )
        saved = tuple(
            replace(like[0], shape=tuple(map(sizes.of, zip(*(s.shape for s in like), strict=True))))
            for like in zip(*(g.saved for g in graphs), strict=True)
        )
        return replace(
            first,
            operations=operations,
            storages=storages,
            saved=saved,
            resident_bytes=sizes.of(g.resident_bytes for g in graphs),
            plain_seconds=seconds(g.plain_seconds for g in graphs),
            overhead_seconds=seconds(g.overhead_seconds for g in graphs),
            replay_overhead_seconds=seconds(g.replay_overhead_seconds for g in graphs),
        )
    except ValueError:  # a size does not say, or a tensor has more dimensions at one length
        return None


class _Sizes:
    """Sizes at a length from those at the known ones."""

    def __init__(self, known: Sequence[int], length: int, below: int) -> None:
        self.known, self.length, self.below = known, length, below
        self.found: dict[tuple[int, ...], int | None] = {}

    def of(self, sizes: Iterable[int]) -> int:
        """The size on the curve through all.

        Raises:
            ValueError: there is none.
        """
        several = tuple(sizes)
        if several not in self.found:
            self.found[several] = _at(self.known, several, self.length)
        size = self.found[several]
        if size is None:
            raise ValueError
        return size

    def scratch(self, sizes: Iterable[int]) -> int:
        """As `of`; but what an operation takes for its threads and blocks changes in steps, and is known
        where both neighbours agree.
        """
        several = tuple(sizes)
        between = several[self.below : self.below + 2]
        return between[0] if between[0] == between[1] else self.of(several)


def _at(known: Sequence[int], sizes: Sequence[int], length: int) -> int | None:
    """The size at ``length``, if the known ones lie on one curve that they are enough to tell."""
    if len(set(sizes)) == 1:
        return sizes[0]
    curves: list[Callable[[int], Fraction]] = []
    (n, m), (a, b) = known[:2], sizes[:2]
    curves.append(lambda x: a + Fraction(b - a, m - n) * (x - n))
    curves.append(lambda x: Fraction(a, n * n) * x * x)
    if len(known) > 3:
        curves.append(_quadratic(known[:3], sizes[:3]))
    for curve in curves:
        if all(curve(x) == y for x, y in zip(known, sizes, strict=True)):
            found = curve(length)
            return int(found) if found.denominator == 1 and found >= 0 else None
    return None


def _quadratic(known: Sequence[int], sizes: Sequence[int]) -> Callable[[int], Fraction]:
    """Lagrange's polynomial through three points."""

    def at(x: int) -> Fraction:
        total = Fraction(0)
        for k, (n, size) in enumerate(zip(known, sizes, strict=True)):
            part = Fraction(size)
            for other in (m for j, m in enumerate(known) if j != k):
                part *= Fraction(x - other, n - other)
            total += part
        return total

    return at
