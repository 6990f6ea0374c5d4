"""The memory of a step, plain and planned, stacked by what it is, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lowtide.budget import format_bytes
from lowtide.report.report import Report
from lowtide.words import seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = ("#566a92", "#7f6bb0", "#b3679b", "#8b939e", "#1f9d86", "#e39422", "#a3743f", "#d9566b")
"""One for each of `KINDS`, as on the page."""

_WORDS = (
    "parameters",
    "optimizer state",
    "gradients",
    "inputs",
    "activations",
    "recomputed",
    "moved",
    "temporaries",
)


def stacked_picture(report: Report) -> Figure:
    """The plain and the planned step side by side.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    sides = figure.subplots(1, 2, sharey=True)
    longest = max(report.plain.seconds, report.planned.seconds)
    budget = report.summary["budget_bytes"]
    for axes, line, name in zip(sides, (report.plain, report.planned), ("plain", "planned"), strict=True):
        when = [*(tick.seconds for tick in line.ticks), line.seconds]
        rows = line.bytes_by_kind() / 2**20
        rows = np.concatenate([rows, rows[:, -1:]], axis=1)
        there = rows.max(axis=1, initial=0) > 0
        axes.stackplot(
            when,
            rows[there],
            step="post",
            colors=[color for color, is_there in zip(_COLORS, there, strict=True) if is_there],
            labels=[word for word, is_there in zip(_WORDS, there, strict=True) if is_there],
        )
        if budget is not None:
            axes.axhline(budget / 2**20, color="black", linestyle="--", linewidth=1.2)
        peak = f"{name}: {format_bytes(line.peak_bytes)}, {seconds_text(line.seconds)}"
        axes.set(title=peak, xlabel="seconds, forecast", xlim=(0, longest or 1), ylim=(0, None))
        axes.grid(alpha=0.25)
    sides[0].set_ylabel("live memory (MiB)")
    found = {
        text: drawn for axes in sides for drawn, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    order = [word for word in reversed(_WORDS) if word in found]
    figure.legend([found[word] for word in order], order, loc="outside right center", frameon=False)
    within = "" if budget is None else f", budget {format_bytes(budget)}"
    figure.suptitle(f"{report.title}{within}")
    return figure
