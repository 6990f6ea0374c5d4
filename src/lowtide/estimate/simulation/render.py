"""A simulation as people read it: stage by stage, line by line beside the closed form, and as a picture."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.budget import format_bytes
from lowtide.estimate.render import drawing, gib
from lowtide.estimate.render import title as config_title
from lowtide.estimate.simulation.compose import FINE_TURNS
from lowtide.estimate.simulation.simulate import StageSimulation, StepSimulation
from lowtide.estimate.tables import Whole

_gib = partial(gib, digits=3)


def _table(name: str, columns: tuple[str, ...], left: tuple[str, ...] = ()) -> Table:
    table = Table(
        title=name, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column not in left)
    return table


def stage_table(found: StepSimulation) -> Table:
    """One row a stage: what the trace found, with the closed form's figure behind it."""
    columns = (
        "stage", "weights", "gradients", "kept", "by\nformula", "kept and\ntemporary", "by\nformula",
        "peak without\noptimizer",
    )  # fmt: skip
    table = _table("GiB on one rank of each stage: traced, and by the closed form", columns)
    for stage in found.stages:
        timeline, closed = stage.timeline, stage.closed
        table.add_row(
            str(timeline.stage), _gib(timeline.parameter_bytes + timeline.buffer_bytes),
            _gib(timeline.gradient_bytes), _gib(timeline.held_bytes), _gib(closed.activations_bytes),
            _gib(timeline.activation_peak_bytes), _gib(closed.activation_peak_bytes),
            _gib(timeline.peak_bytes),
        )  # fmt: skip
    return table


def row_table(stage: StageSimulation) -> Table:
    """What a stage keeps for backward at its fullest, line by line."""
    name = f"Stage {stage.timeline.stage}: kept for backward, {stage.timeline.in_flight} in flight"
    table = _table(name, ("what", "formula", "trace", "difference", "why"), ("what", "why"))
    for row in stage.rows:
        difference = row.difference_bytes
        sign = "+" if difference > 0 else "-" if difference < 0 else ""
        style = "green" if difference == 0 else "yellow"
        size = Text("equal" if difference == 0 else f"{sign}{format_bytes(abs(difference))}", style=style)
        table.add_row(row.name, format_bytes(row.closed_bytes), format_bytes(row.traced_bytes), size, row.why)
    return table


def report(found: StepSimulation) -> Group:
    """Everything, for a terminal."""
    parts: list[RenderableType] = [Whole(stage_table(found))]
    for stage in found.stages:
        parts.append(row_table(stage))
        peak = stage.timeline.peak
        where = f"{peak.operation} in {peak.module or 'the model'}{', recomputed' if peak.in_replay else ''}"
        parts.append(
            f"the peak: {peak.kind} of micro-batch {peak.micro_batch}, chunk {peak.chunk}, at {where}"
        )
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


def plot_timeline(found: StepSimulation, path: Path) -> None:
    """Draw live memory over the step, one curve a stage; the file's ending says which format.

    Raises:
        EstimateError: matplotlib is not installed, or the file cannot be written.
    """
    with drawing(path) as (figure, axes):
        for stage in found.stages:
            timeline = stage.timeline
            label = f"stage {timeline.stage}: peak {format_bytes(timeline.peak_bytes)}"
            (line,) = axes.step(
                timeline.seconds, timeline.live_bytes / 2**30, where="post", linewidth=0.9, label=label
            )
            resident = (
                timeline.parameter_bytes
                + timeline.buffer_bytes
                + timeline.input_bytes
                + timeline.gradient_bytes
            ) / 2**30
            axes.axhline(
                resident + stage.closed.activation_peak_bytes / 2**30,
                color=line.get_color(),
                linestyle=":",
                linewidth=1,
            )
        unit = (
            "seconds since the stage began, by the roofline"
            if found.stages[0].timeline.timed
            else "forwards and backwards of the stage"
        )
        if any(len(stage.timeline.turn_peaks) > FINE_TURNS for stage in found.stages):
            unit += f" (the first {FINE_TURNS} turns)"
        axes.set(xlabel=unit, ylabel="GiB live on one rank", title=config_title(found.config), ylim=(0, None))
        figure.legend(
            loc="outside lower center",
            ncols=4,
            fontsize="small",
            title="dotted: closed form",
            title_fontsize="small",
        )
        axes.grid(alpha=0.3)
