"""A traced step as text: what it takes, where, and for how long."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import replace

from lowtide.graph import StepGraph
from lowtide.plan.data import ModuleRow, Plan
from lowtide.plan.data.text import in_columns, place_in_words, with_total
from lowtide.words import count_text, format_bytes, seconds_text


def in_text(graph: StepGraph, plan: Plan, width: int | None = None) -> str:
    """Head lines, and a table of the forward's modules; no wider than the terminal.

    Args:
        graph: the step.
        plan: that keeps all.
        width: most characters of a line; ``None`` goes by the terminal.
    """
    width = width or shutil.get_terminal_size((0, 0)).columns or None
    forward = sum(operation.phase == "forward" for operation in graph.operations)
    lines = [
        f"step graph {plan.graph}: {count_text(forward, 'operation')} in forward, "
        f"{len(graph.operations) - forward:,} in backward, {count_text(len(graph.saved), 'saved tensor')}",
        f"peak   {format_bytes(plan.plain_peak_bytes)}, {format_bytes(graph.resident_bytes)} of that before "
        "the step",
        f"       {place_in_words(plan.peak_operation, plan.peak_module)}",
        f"time   {seconds_text(plan.plain_seconds)}, the sum of the operations",
        *(f"note: {note}" for note in plan.notes),
    ]
    if width is not None:
        lines = [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent=" " * 7)]
    cells = [("module", "saved by autograd", "operations", "time")]
    cells += [
        (
            row.module or "(the model itself)",
            format_bytes(row.saved_bytes),
            str(row.replayed_operations),
            seconds_text(row.extra_seconds),
        )
        for row in with_total(_rows(graph, plan))
    ]
    return "\n".join([*lines, "", *in_columns(cells, width)])


def _rows(graph: StepGraph, plan: Plan) -> list[ModuleRow]:
    """The modules, with the operations of their forwards and what these take."""
    saved = {row.module: row.saved_bytes for row in plan.modules}
    rows: dict[str, ModuleRow] = {}
    for operation in graph.operations:
        if operation.phase == "forward":
            name = operation.module
            row = rows.setdefault(name, ModuleRow(name, saved.pop(name, 0), 0, 0, 0.0))
            count, seconds = row.replayed_operations + 1, row.extra_seconds + operation.seconds
            rows[name] = replace(row, replayed_operations=count, extra_seconds=seconds)
    return [*rows.values(), *(ModuleRow(name, bytes, 0, 0, 0.0) for name, bytes in saved.items())]
