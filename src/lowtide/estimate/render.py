"""An estimate as people read it: a table in the terminal, CSV, and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.budget import format_bytes, would_reserve
from lowtide.estimate.config import Config
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.lines import KINDS, MOMENTS, Stage
from lowtide.estimate.suggest import Suggestions
from lowtide.estimate.tables import Whole
from lowtide.estimate.total import Estimate, reserved
from lowtide.words import count_text, seconds_text

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


def parameters_text(count: int) -> str:
    """A number of parameters, of small models in millions.

    >>> parameters_text(8_030_261_248), parameters_text(10_745_088)
    ('8.03 B', '10.7 M')
    """
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.3g} M"


def _stages(found: Estimate) -> list[Stage]:
    """The stages that a table shows: all of a few, the ends and every so many of a long pipeline."""
    if len(found.stages) <= SHOWN_STAGES:
        return list(found.stages)
    step = (len(found.stages) - 1) / (SHOWN_STAGES - 1)
    return [found.stages[round(index * step)] for index in range(SHOWN_STAGES)]


def gib(count: int, digits: int = 2) -> str:
    """Bytes as GiB without the unit, for a column whose heading has it."""
    return f"{count / 2**30:.{digits}f}"


HEADINGS = {"gradients": "grads", "optimizer": "optim.", "activations": "kept", "temporaries": "temp."}
"""Column names that leave room for all columns in 80 characters."""


def header(found: Estimate, name: str | None) -> Text:
    """What is estimated: the model, its batch in words, the devices and how they share."""
    config = found.config
    shares = [("t", config.tp), ("c", config.cp), ("p", config.pp), ("d", config.dp)]
    split = ", ".join(f"{letter}={size}" for letter, size in shares if size > 1)
    zero = f", ZeRO {config.zero}" if config.zero else ""
    stages = f", {count_text(config.stage_layers, 'layer')}" + " a stage" * (config.pp > 1)
    sequences = f"{config.micro_batch} x {config.seq:,} tokens a micro-batch"
    batches = count_text(config.micro_batches, "micro-batch", "micro-batches")
    batches += f" x d={config.dp}" if config.dp > 1 else ""
    active = config.model.active_parameters()
    used = f" ({parameters_text(active)} active)" if active != found.parameters else ""
    split += f", {config.ep} share the experts" if config.ep > 1 else ""
    return Text(
        f"{name or 'model'}: {parameters_text(found.parameters)} parameters{used}{stages}, on "
        f"{count_text(config.devices, 'device')}{f' ({split}{zero})' if split else ''}\n"
        f"{sequences}; a step: {batches} = {count_text(config.global_batch, 'sequence')}, "
        f"{config.global_batch * config.seq:,} tokens",
        style="bold",
    )


def summary_table(found: Estimate) -> Table:
    """One row a pipeline stage. Fits 80 characters."""
    config = found.config
    table = Table(
        title="GiB on one device of each pipeline stage; total: at the peak, where not all is live; "
        "reserved: by PyTorch's allocator with expandable segments",
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    whole = config.memory_bytes is not None and config.recompute != "none"
    names = ["stage", *(HEADINGS.get(kind, kind) for kind in KINDS), "total", "reserved"]
    names += ["left"] if config.memory_bytes is not None else []
    names += ["whole"] if whole else []
    for name in names:
        table.add_column(name, justify="right", style="bold" if name == "reserved" else "", no_wrap=True)
    for stage in _stages(found):
        held = reserved(config, stage, expandable=True)
        row: list[str | Text] = [str(stage.index), *(gib(stage.bytes(kind)) for kind in KINDS)]
        row += [gib(stage.total_bytes), gib(held)]
        if config.memory_bytes is not None:
            left = int(config.memory_bytes) - held
            row.append(Text(gib(left, 1), style="green" if left >= 0 else "bold red"))
        if whole:
            row.append(f"{stage.whole_micro_batches} of {float(stage.micro_batches_in_flight):.0f}")
        table.add_row(*row)
    return table


def line_table(stage: Stage) -> Table:
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
            "" if line.kind == before else kind, line.name, format_bytes(line.bytes), line.formula,
            line.source,
        )  # fmt: skip
        before = line.kind
    return table


def figures(found: Estimate) -> Table:
    """What is not by stage: FLOPs, utilisation, traffic."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    flops = found.flops
    moments = ", ".join(f"{name} {gib(size)}" for name, size in found.moments.items())
    fullest = max(found.stages, key=lambda stage: stage.total_bytes)
    table.add_row("GiB at each moment", moments, f"the largest is the peak: {fullest.peak_at}")
    loss = found.loss
    piece = " of a piece" if loss["pieces"] > 1 else ""
    table.add_row("loss", f"{loss['kind']}, {loss['bytes_a_logit']} bytes a logit{piece}", loss["what"])
    table.add_row("model FLOPs a step", flops_text(flops.model), "arXiv 2205.05198 Eq. 7")
    table.add_row(
        "hardware FLOPs a step",
        flops_text(flops.hardware),
        f"its Eq. 8; executed: {flops_text(flops.executed)}",
    )
    if found.mfu is not None and found.hfu is not None:
        table.add_row(
            "MFU, HFU", f"{100 * found.mfu:.1f} %, {100 * found.hfu:.1f} %", "of the peak rate given"
        )
    if found.time is not None and found.tokens_per_second is not None:
        share = flops.model / found.config.devices / found.time.total
        of_peak = f", MFU {100 * share / found.config.peak_flops:.0f} %" if found.config.peak_flops else ""
        table.add_row("predicted step", seconds_text(found.time.total), "efficiencies of published runs")
        table.add_row(
            "tokens a second and device", f"{found.tokens_per_second:,.0f}", of_peak.removeprefix(", ")
        )
    table.add_row("network, a device and step", format_bytes(found.network_bytes), "busiest stage")
    if found.host_link_bytes:
        table.add_row("host link, a device and step", format_bytes(found.host_link_bytes), "both directions")
    if found.host_bytes:
        all_devices = format_bytes(found.config.devices * found.host_bytes)
        table.add_row("host memory, a device", format_bytes(found.host_bytes), f"all devices: {all_devices}")
    return table


def report(found: Estimate, stage: int = 0, lines: bool = True, name: str | None = None) -> Group:
    """Everything, for a terminal."""
    parts: list[RenderableType] = [header(found, name), Whole(summary_table(found))]
    if lines:
        parts.append(line_table(found.stages[stage]))
    parts.append(figures(found))
    if found.config.memory_bytes is not None:
        verdict = "fits" if found.fits else "does not fit"
        style = "bold green" if found.fits else "bold red"
        parts.append(
            Text(
                f"{verdict}: {format_bytes(found.reserved_expandable_bytes)} reserved of "
                f"{format_bytes(found.config.memory_bytes)}, "
                f"{format_bytes(found.total_bytes)} in use at the peak",
                style=style,
            )
        )
    notes = (would_reserve(found.reserved_bytes, found.reserved_expandable_bytes), *found.notes)
    parts += [Text(f"note: {note}", style="dim") for note in notes]
    return Group(*parts)


def show(
    found: Estimate, console: Console, stage: int = 0, lines: bool = True, name: str | None = None
) -> None:
    """Print everything; ``name`` is what the model is called."""
    console.print(report(found, stage, lines, name))


def to_csv(found: Estimate) -> str:
    """Every line of every stage: stage, kind, place, name, bytes, formula, source, note, bytes a moment."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("stage", "kind", "place", "name", "bytes", "formula", "source", "note", *MOMENTS))
    for stage in found.stages:
        for line in stage.lines:
            names = ("kind", "place", "name", "bytes", "formula", "source", "note")
            told = (getattr(line, name) for name in names)
            writer.writerow((stage.index, *told, *line.moments.values()))
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
        raise EstimateError("--plot needs matplotlib: pip install 'lowtide[train]'") from error
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
                places, heights, bottom=bottom, label=kind, color=colour,
                width=0.8 if len(places) > 1 else 0.3,
            )  # fmt: skip
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        if found.config.memory_bytes is not None:
            axes.axhline(
                found.config.memory_bytes / 2**30, color="tab:red", linestyle="--", label="memory of a device"
            )
        axes.set(xlabel="pipeline stage", ylabel="GiB on one device", title=title(found.config))
        axes.set_xticks(places[:: max(1, len(places) // 12)])
        axes.set_xlim(-1, len(places))
        axes.set_ylim(0, 1.15 * max([*bottom, (found.config.memory_bytes or 0) / 2**30]))
        axes.legend(ncols=3, loc="upper right", fontsize="small")


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


def pieces_text(config: Config) -> str:
    """What works in pieces, or is on the host, in letters that the legend of the table explains.

    >>> from lowtide.estimate.settings import configure
    >>> pieces_text(configure("llama3-8b", tiles=16, offload_activations=True))
    'm16 A'
    """
    counts = [
        f"{letter}{count}" for letter, count in (("m", config.tiles), ("a", config.head_chunks)) if count > 1
    ]
    away = [letter for letter, so in (("A", config.offload_activations), ("W", config.offload_weights)) if so]
    return " ".join([*counts, *away, *["x"] * (config.cp_exchange == "all-to-all")])


def suggestion_table(found: Suggestions) -> Table:
    """One row a suggestion, in the order that they have. Fits 80 characters."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    adapters = any(one.config.lora for one in found.best)
    host = any(one.host_bytes for one in found.best)
    left = ("trains", "recompute", "optim.", "loss", "pieces")
    rows = []
    for place, one in enumerate(found.best, 1):
        config = one.config
        more = f" c{config.cp}" * (config.cp > 1) + f" e{config.ep}" * (config.ep > 1)
        cells = {
            "": str(place),
            "t": f"{config.tp}{' sp' if config.sequence_parallel else ''}",
            "p": f"{config.pp}{f' x{config.interleave}' if config.interleave > 1 else ''}",
            "d": f"{config.dp}{more}",
            "Z": str(config.zero),
            "b": str(config.micro_batch),
            "trains": "all" if not config.lora else "QLoRA" if config.quantize != "none" else "LoRA",
            "recompute": str(config.recompute).removeprefix("selective-"),
            "optim.": _place(config.offload_optimizer),
            "loss": config.loss_kind,
            "GiB": gib(one.reserved_expandable_bytes, 1),
            "pieces": pieces_text(config),
            "host": gib(one.host_bytes, 0),
            "s/step": f"{one.time.total:.3g}" if one.time.total < 1000 else f"{one.time.total:.0f}",
            "tok/s": f"{one.tokens_per_second / config.devices:,.0f}",
        }
        rows.append(cells)
    empty = {"host"} if not host else set()
    empty |= {"pieces"} if not any(pieces_text(one.config) for one in found.best) else set()
    empty |= {"trains"} if not adapters else {name for name in "tp" if all(row[name] == "1" for row in rows)}
    shown = [name for name in rows[0] if name not in empty]
    for name in shown:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table
