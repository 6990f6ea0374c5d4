"""An estimate as people read it: a table in the terminal, CSV, and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.budget import format_bytes
from lowtide.estimate.config import Config
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.lines import KINDS, Stage
from lowtide.estimate.suggest import Suggestions
from lowtide.estimate.total import Estimate

SHOWN_STAGES = 8


def flops_text(flops: float) -> str:
    """FLOPs with a prefix.

    >>> flops_text(1.1435e15)
    '1.14 PFLOP'
    """
    for name, size in (("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= size:
            return f"{flops / size:.3g} {name}FLOP"
    return f"{flops:.0f} FLOP"


def _stages(found: Estimate) -> list[Stage]:
    """The stages that a table shows: all of a few, the ends and every so many of a long pipeline."""
    if len(found.stages) <= SHOWN_STAGES:
        return list(found.stages)
    step = (len(found.stages) - 1) / (SHOWN_STAGES - 1)
    return [found.stages[round(index * step)] for index in range(SHOWN_STAGES)]


def gib(count: int, digits: int = 2) -> str:
    """Bytes as GiB without the unit, for a column whose heading has it."""
    return f"{count / 2**30:.{digits}f}"


def summary_table(found: Estimate) -> Table:
    """One row a pipeline stage."""
    table = Table(
        title="GiB on one device of each pipeline stage",
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    for kind in KINDS:
        table.add_column(
            {"activations": "kept", "temporaries": "temporary"}.get(kind, kind), justify="right", no_wrap=True
        )
    table.add_column("total", justify="right", style="bold", no_wrap=True)
    if found.config.memory_bytes is not None:
        table.add_column("left", justify="right", no_wrap=True)
        table.add_column("whole", justify="right", no_wrap=True)
    for stage in _stages(found):
        row: list[str | Text] = [
            str(stage.index),
            str(stage.layers),
            *(gib(stage.bytes(kind)) for kind in KINDS),
            gib(stage.total_bytes),
        ]
        if found.config.memory_bytes is not None:
            left = int(found.config.memory_bytes) - stage.total_bytes
            row.append(Text(gib(left), style="green" if left >= 0 else "bold red"))
            row.append(f"{stage.whole_micro_batches} of {float(stage.micro_batches_in_flight):.3g}")
        table.add_row(*row)
    return table


def line_table(found: Estimate, stage: Stage) -> Table:
    """Every line of one stage, with its formula and equation."""
    table = Table(
        title=f"Stage {stage.index}, line by line",
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("", "what", "bytes", "formula", "equation"):
        table.add_column(
            name,
            justify="right" if name == "bytes" else "left",
            overflow="fold",
            no_wrap=name in ("", "bytes", "formula"),
        )
    before = ""
    for line in stage.lines:
        kind = {"activations": "kept", "temporaries": "temporary"}.get(line.kind, line.kind)
        table.add_row(
            "" if line.kind == before else kind,
            line.name,
            format_bytes(line.bytes),
            line.formula,
            line.source,
        )
        before = line.kind
    return table


def figures(found: Estimate) -> Table:
    """What is not by stage: FLOPs, utilisation, traffic."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    flops = found.flops
    table.add_row("parameters", f"{found.parameters / 1e9:.3f} B", f"on {found.config.devices} devices")
    table.add_row("model FLOPs a step", flops_text(flops.model), "arXiv 2205.05198 Eq. 7")
    table.add_row(
        "hardware FLOPs a step",
        flops_text(flops.hardware),
        f"arXiv 2205.05198 Eq. 8; executed: {flops_text(flops.executed)}",
    )
    if found.mfu is not None and found.hfu is not None:
        table.add_row(
            "MFU, HFU", f"{100 * found.mfu:.1f} %, {100 * found.hfu:.1f} %", "of the peak rate given"
        )
    table.add_row("network, a device and step", format_bytes(found.network_bytes), "busiest stage")
    if found.host_link_bytes:
        table.add_row("host link, a device and step", format_bytes(found.host_link_bytes), "both directions")
    if found.host_bytes:
        table.add_row("host memory, a device", format_bytes(found.host_bytes), "")
    return table


def report(found: Estimate, stage: int = 0, lines: bool = True) -> Group:
    """Everything, for a terminal."""
    parts: list[RenderableType] = [summary_table(found)]
    if lines:
        parts.append(line_table(found, found.stages[stage]))
    parts.append(figures(found))
    if found.config.memory_bytes is not None:
        verdict = "fits" if found.fits else "does not fit"
        style = "bold green" if found.fits else "bold red"
        parts.append(
            Text(
                f"{verdict}: {format_bytes(found.total_bytes)} of {format_bytes(found.config.memory_bytes)}",
                style=style,
            )
        )
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


def show(found: Estimate, console: Console, stage: int = 0, lines: bool = True) -> None:
    """Print everything."""
    console.print(report(found, stage, lines))


def to_csv(found: Estimate) -> str:
    """Every line of every stage: stage, kind, place, name, bytes, formula, source, note."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("stage", "kind", "place", "name", "bytes", "formula", "source", "note"))
    for stage in found.stages:
        for line in stage.lines:
            writer.writerow(
                (
                    stage.index,
                    line.kind,
                    line.place,
                    line.name,
                    line.bytes,
                    line.formula,
                    line.source,
                    line.note,
                )
            )
    return text.getvalue()


@contextmanager
def drawing(path: Path) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, saved to ``path`` when the block ends.

    Raises:
        EstimateError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EstimateError("--plot needs matplotlib: pip install 'lowtide[pictures]'") from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure, figure.add_subplot()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise EstimateError(f"cannot write --plot={str(path)!r}: {error}") from error


def plot(found: Estimate, path: Path) -> None:
    """Draw the stages as stacked bars; the file's ending says which format.

    Raises:
        EstimateError: matplotlib is not installed, or the file cannot be written.
    """
    with drawing(path) as (_, axes):
        places = [stage.index for stage in found.stages]
        bottom = [0.0] * len(places)
        for kind, colour in zip(
            KINDS, ("tab:blue", "tab:cyan", "tab:purple", "tab:green", "tab:olive"), strict=True
        ):
            heights = [stage.bytes(kind) / 2**30 for stage in found.stages]
            axes.bar(
                places,
                heights,
                bottom=bottom,
                label=kind,
                color=colour,
                width=0.8 if len(places) > 1 else 0.3,
            )
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        if found.config.memory_bytes is not None:
            axes.axhline(
                found.config.memory_bytes / 2**30, color="tab:red", linestyle="--", label="memory of a device"
            )
        axes.set(xlabel="pipeline stage", ylabel="GiB on one device", title=title(found.config))
        axes.set_xticks(_ticks(places))
        axes.set_xlim(-1, len(places))
        axes.set_ylim(0, 1.15 * max([*bottom, (found.config.memory_bytes or 0) / 2**30]))
        axes.legend(ncols=3, loc="upper right", fontsize="small")


def _ticks(places: Sequence[int]) -> list[int]:
    step = max(1, len(places) // 12)
    return list(places[::step])


def title(config: Config) -> str:
    """One line that says what was estimated."""
    count = config.model.parameters()
    size = f"{count / 1e9:.4g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
    parts = [f"{size} parameters", f"s={config.seq}", f"b={config.micro_batch}", f"t={config.tp}"]
    if config.sequence_parallel:
        parts.append("sequence parallel")
    if config.pp > 1:
        parts.append(f"p={config.pp}" + (f", m={config.interleave}" if config.interleave > 1 else ""))
    if config.dp > 1:
        parts.append(f"d={config.dp}" + (f", ZeRO {config.zero}" if config.zero else ""))
    parts.append(f"recompute {config.recompute}")
    return ", ".join(parts)


def _place(offload: float) -> str:
    return "device" if offload == 0 else "host" if offload == 1 else f"host {offload:.0%}"


def suggestion_table(found: Suggestions) -> Table:
    """One row a suggestion, in the order that they have. Fits 80 characters."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    left = ("recompute", "optim.", "loss")
    host = any(one.host_bytes for one in found.best)
    for name in ("", "t", "p", "d", "Z", "b", *left, "GiB", *(["host"] if host else []), "s/step", "tok/s"):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for place, one in enumerate(found.best, 1):
        config = one.config
        table.add_row(
            str(place),
            f"{config.tp}{' sp' if config.sequence_parallel else ''}",
            f"{config.pp}{f' x{config.interleave}' if config.interleave > 1 else ''}",
            str(config.dp),
            str(config.zero),
            str(config.micro_batch),
            str(config.recompute).removeprefix("selective-"),
            _place(config.offload_optimizer),
            config.loss_kind,
            gib(one.reserved_bytes, 1),
            *([gib(one.host_bytes, 0)] if host else []),
            f"{one.time.total:.3g}",
            f"{one.tokens_per_second / config.devices:,.0f}",
        )
    return table
