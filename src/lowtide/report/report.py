"""A report: all that is shown of one step and its plan, as plain data.

In: a step graph, a plan for it, and what was measured. Out: a `Report`, from which the page (`page`), the
picture (`stacked`) and the trace for PyTorch's memory viewer (`viewer`) are made.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lowtide.budget import would_reserve
from lowtide.errors import PlanError, expect
from lowtide.extensions.moves.simulate import sources_of
from lowtide.graph import StepGraph
from lowtide.plan.data import Plan
from lowtide.plan.reserved_bytes import reserved_either_way
from lowtide.plan.simulate import Simulator
from lowtide.plan.simulate.holders import planned_holders
from lowtide.remedies import Holder, in_lines
from lowtide.report.page import page
from lowtide.report.picture import Curve
from lowtide.report.timeline import KINDS, Span, Timeline, in_words, timeline
from lowtide.report.tradeoff import Point, tradeoff

DECISIONS = ("kept", "recomputed", "offloaded", "compressed", "sharded")
_CURVE_COLUMNS = 600


@dataclass(frozen=True)
class Decided:
    """What a plan does with what autograd saves in one module.

    Attributes:
        module: qualified name.
        saved_bytes: decision -> bytes; the order is that of `DECISIONS`.
        replayed: operations that run again.
        extra_seconds: of those.
    """

    module: str
    saved_bytes: tuple[int, ...]
    replayed: int = 0
    extra_seconds: float = 0.0


@dataclass(frozen=True)
class Measured:
    """What one way of running the step was seen to take.

    Attributes:
        peak_bytes: the most live bytes, counted as a plan's are; ``None`` where that was not measured.
        seconds: time of a step; ``None`` where it was not measured.
        curve: (seconds, live bytes) over one step; empty where it was not measured.
    """

    peak_bytes: int | None = None
    seconds: float | None = None
    curve: tuple[tuple[float, int], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, peak_bytes: int, seconds: float, curve: Curve) -> Measured:
        """A measured step; of its curve the most within each of 600 stretches of time is kept."""
        length = curve.seconds
        columns = curve.columns(_CURVE_COLUMNS, length) if length else []
        moments = ((length * k / _CURVE_COLUMNS, live) for k, live in enumerate(columns) if live is not None)
        return cls(peak_bytes, seconds, tuple(moments))


@dataclass(frozen=True)
class Report:
    """One step and its plan.

    Attributes:
        title: which step, in words.
        summary: the plan's numbers and words by the names of `lowtide.Plan`, and ``by_operation``: whether
            the timelines have other peaks than these, since a compiler fuses operations; on CUDA also
            ``reserved_bytes`` and ``reserved_expandable_bytes``: what PyTorch's allocator takes for them.
        plain, planned: what is in memory when, forecast.
        decided: what the plan does, a row a module, in the order of the forward.
        holders: what holds most at the planned step's peak, the largest first.
        points: what other budgets would cost.
        measured_plain, measured_planned: what was measured; ``None`` for nothing.
        measured_extra: measured extra time as a share of the plain step, where both ran in pairs.

    Example:
        >>> from lowtide.report import make_report, save_report
        >>> save_report(make_report(graph, plan), "page.html")  # doctest: +SKIP
    """

    title: str
    summary: dict[str, Any]
    plain: Timeline = field(repr=False)
    planned: Timeline = field(repr=False)
    decided: tuple[Decided, ...] = field(repr=False)
    points: tuple[Point, ...] = ()
    holders: tuple[Holder, ...] = ()
    measured_plain: Measured | None = None
    measured_planned: Measured | None = None
    measured_extra: float | None = None

    def _repr_html_(self) -> str:
        """For a notebook: the page, in a frame."""
        text = html.escape(page(self))
        return f'<iframe srcdoc="{text}" style="width: 100%; height: 45em; border: 0"></iframe>'

    def to_json(self) -> dict[str, Any]:
        """This report as a dictionary of plain values."""
        texts: dict[str, int] = {}
        labels: dict[tuple[Any, ...], int] = {}
        return {
            "title": self.title,
            "summary": self.summary,
            "plain": _pack(self.plain, texts, labels),
            "planned": _pack(self.planned, texts, labels),
            "decided": [asdict(row) for row in self.decided],
            "points": [asdict(point) for point in self.points],
            "helps": in_lines(self.holders),
            "measured_plain": _plain_data(self.measured_plain),
            "measured_planned": _plain_data(self.measured_planned),
            "measured_extra": self.measured_extra,
            "texts": list(texts),
            "labels": [list(label) for label in labels],
        }


def make_report(
    graph: StepGraph,
    plan: Plan,
    *,
    title: str = "one training step",
    optimizer_bytes: int = 0,
    points: Sequence[Point] | None = None,
    measured_plain: Measured | None = None,
    measured_planned: Measured | None = None,
    measured_extra: float | None = None,
) -> Report:
    """All that is to be shown of a step and its plan.

    Args:
        graph: the step.
        plan: made for it.
        title: which step it is.
        optimizer_bytes: what of the graph's resident bytes is the optimizer's state.
        points: what other budgets would cost; ``None`` plans for some, for at most about four seconds.
        measured_plain, measured_planned, measured_extra: see `Report`.

    Raises:
        PlanError: the plan was made for another graph, or an argument is something else.
    """
    expect(
        isinstance(graph, StepGraph), "make_report(graph=)", graph, "a StepGraph, as lowtide.trace returns"
    )
    expect(isinstance(plan, Plan), "make_report(plan=)", plan, "what lowtide.plan returns")
    if [step.name for step in plan.program] != [op.name for op in graph.operations if op.phase == "forward"]:
        raise PlanError(
            f"the plan was made for step graph {plan.graph}, and this one runs other operations: give the "
            "graph that it was made for"
        )
    plain = timeline(graph, None, optimizer_bytes)
    planned = timeline(graph, plan, optimizer_bytes)
    numbers = {f.name: getattr(plan, f.name) for f in fields(plan)}
    summary = {k: v for k, v in numbers.items() if isinstance(v, int | float | str) or v is None}
    notes = list(plan.notes)
    if graph.device.startswith("cuda") and not plan.moves:  # what moves has memory of its own
        either = reserved_either_way(graph, plan.stored)
        summary |= dict(zip(("reserved_bytes", "reserved_expandable_bytes"), either, strict=True))
        notes += [told for told in (would_reserve(*either),) if told not in notes]
    peaks = plan.plain_peak_bytes, plan.predicted_peak_bytes  # of compiled code, what it allocates
    summary["by_operation"] = (plain.peak_bytes, planned.peak_bytes) != peaks
    return Report(
        title,
        {**summary, "notes": notes, "changes_nothing": plan.changes_nothing},
        plain,
        planned,
        decision_rows(graph, plan),
        tuple(tradeoff(graph) if points is None else points),
        planned_holders(graph, plan, optimizer_bytes, sources_of),
        measured_plain,
        measured_planned,
        measured_extra,
    )


def decision_rows(graph: StepGraph, plan: Plan) -> tuple[Decided, ...]:
    """What a plan does with what autograd saves, a row a module. A block of memory counts once, as kept where
    any tensor in it is kept, and only where keeping it for backward takes memory."""
    sim = Simulator(graph)
    how: dict[int, str] = {}
    for value in sim.saved_hold:
        storage = sim.storage_of[value]
        if value in plan.decisions and how.get(storage) != "kept":
            how[storage] = in_words(plan.decisions[value])
    module_of: dict[int, str] = {}
    for tensor in graph.saved:
        module_of.setdefault(sim.storage_of[tensor.value], tensor.module)
    order = dict.fromkeys([operation.module for operation in graph.operations] + list(module_of.values()))
    rows = {module: [0] * len(DECISIONS) for module in order}
    for storage, release in sim.storage_hold.items():
        if release > sim.natural_end[storage]:
            place = DECISIONS.index(how.get(storage, "kept"))
            rows[module_of[storage]][place] += graph.storages[storage].bytes
    again = {row.module: row for row in plan.modules}
    found = []
    for module, saved in rows.items():
        row = again.get(module)
        replayed, seconds = (row.replayed_operations, row.extra_seconds) if row else (0, 0.0)
        if any(saved) or replayed:
            found.append(Decided(module, tuple(saved), replayed, seconds))
    return tuple(found)


def _pack(line: Timeline, texts: dict[str, int], labels: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    """A timeline as columns of numbers, with every text and every label once."""

    def text(words: str) -> int:
        return texts.setdefault(words, len(texts))

    def label(span: Span) -> int:
        words = (span.module, span.name, span.form, span.decision)
        key = (KINDS.index(span.kind), *(text(word) for word in words))
        return labels.setdefault(key, len(labels))

    phases = {"forward": 0, "backward": 1, "replay": 2}
    return {
        "seconds": line.seconds,
        "ticks": {
            "seconds": [float(f"{tick.seconds:.7g}") for tick in line.ticks],
            "operation": [text(tick.operation) for tick in line.ticks],
            "module": [text(tick.module) for tick in line.ticks],
            "phase": [phases[tick.phase] for tick in line.ticks],
        },
        "spans": {
            "born": [span.born for span in line.spans],
            "gone": [span.gone for span in line.spans],
            "bytes": [span.bytes for span in line.spans],
            "label": [label(span) for span in line.spans],
        },
    }


def _plain_data(measured: Measured | None) -> dict[str, Any] | None:
    if measured is None:
        return None
    curve = [[float(f"{when:.6g}"), live] for when, live in measured.curve]
    return {"peak_bytes": measured.peak_bytes, "seconds": measured.seconds, "curve": curve}
