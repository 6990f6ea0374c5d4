"""The command ``lowtide suggest``. It imports no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.budget import format_bytes
from lowtide.estimate import command as options
from lowtide.estimate.command import (
    memory_note,
    option,
    parse_memory,
    parse_recompute,
    refuse_zero,
    with_flags,
)
from lowtide.estimate.tables import Whole
from lowtide.words import count_text

if TYPE_CHECKING:
    from lowtide.estimate.suggest import Suggestions

_VARIED = (
    "micro_batch",
    "tp",
    "sequence_parallel",
    "pp",
    "interleave",
    "dp",
    "cp",
    "ep",
    "zero",
    "recompute",
    "tiles",
    "head_chunks",
    "cp_exchange",
    "offload_activations",
    "offload_weights",
)
_SHORTEST = 512
"""Tokens of the shortest sequence that is looked at where a model's longest does not fit."""

_SHARED = """memory seq attention dropout dtype gradient_dtype optimizer update lora lora_targets lora_dtype
lora_dropout dora quantize loss compile float8"""


@with_flags(*_SHARED.split(), *_VARIED, varied=_VARIED)
def suggest_command(
    given: dict[str, Any],
    model: Annotated[str, typer.Option(help=options.MODEL_HELP)],
    devices: Annotated[
        int, typer.Option(help="Number of accelerators. Each configuration uses all of them.")
    ],
    device: Annotated[
        str,
        typer.Option(
            help="v100, a100, a100-40gb, h100, h200, b200, ...: use the peak rate, links and memory of this "
            "device."
        ),
    ] = "a100",
    peak_tflops: Annotated[
        float | None, option("Peak TFLOP/s of one device. [default: that of --device]")
    ] = None,
    node: Annotated[int | None, option("Devices in a node. [default: that of --device, 8]")] = None,
    node_bandwidth: Annotated[
        float | None, option("GB/s that a device sends within a node. [default: that of --device]")
    ] = None,
    network_bandwidth: Annotated[
        float | None, option("GB/s that a device sends to other nodes. [default: that of --device]")
    ] = None,
    host_bandwidth: Annotated[
        float | None,
        option("GB/s between a device and the host, in one direction. [default: that of --device]"),
    ] = None,
    memory_bandwidth: Annotated[
        float | None, option("GB/s between a device and its own memory. [default: that of --device]")
    ] = None,
    reserve: Annotated[
        float,
        typer.Option(help="Share of the memory that is left free for the driver and communication buffers."),
    ] = 0.04,
    global_batch: Annotated[
        int | None, option("Sequences in an optimizer step. [default: about 4M tokens]")
    ] = None,
    offload_optimizer: Annotated[
        float | None,
        option(
            "Fraction of the optimizer state and of the gradients on the host; 1 is ZeRO-Offload. [default: "
            "0 and 1 are tried]"
        ),
    ] = None,
    runs_with: Annotated[
        str | None,
        option(
            "Framework that runs the configurations: lowtide, torchtitan, megatron, trl or axolotl; any has "
            "all formulas, without commands. [default: the first of lowtide, torchtitan and trl that has the "
            "model and fits]",
            "--for",
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="Number of configurations to show.")] = 8,
    json_out: options.Json = False,
) -> None:
    """Suggest configurations that fit the memory: parallel sizes, microbatch, recomputation and offload.

    The fastest predicted configuration comes first. If several are about equally fast, the simplest comes
    first. A flag fixes its setting; settings without a flag are tried. The exit status is 1 if nothing fits.
    """
    memory = given.pop("memory", None)
    own = dict(global_batch=global_batch, offload_optimizer=offload_optimizer)
    given |= {name: value for name, value in own.items() if value is not None}
    from lowtide.estimate.config import flag
    from lowtide.estimate.devices import device as find_device
    from lowtide.estimate.errors import EstimateError
    from lowtide.estimate.frameworks import candidates
    from lowtide.estimate.presets import preset_name
    from lowtide.estimate.speed import ASSUMPTIONS
    from lowtide.estimate.suggest import VARIED, suggest

    scaled = dict(
        node_bandwidth=node_bandwidth,
        network_bandwidth=network_bandwidth,
        host_bandwidth=host_bandwidth,
        memory_bandwidth=memory_bandwidth,
    )
    for name, value in {**scaled, "peak_tflops": peak_tflops, "node": node}.items():
        if value is not None and not value > 0:
            raise EstimateError(f"{flag(name)}={value}: a number above 0 is needed")
    changes: dict[str, Any] = {name: value * 1e9 for name, value in scaled.items() if value is not None}
    if peak_tflops is not None:
        changes["flops"] = peak_tflops * 1e12
    if node is not None:
        changes["node"] = node
    refuse_zero(given)
    kind = find_device(device, **changes)
    memory_bytes = parse_memory(memory) if memory is not None else kind.memory_bytes
    given["recompute"] = parse_recompute(given.get("recompute"))
    model = preset_name(model)

    def look(given: dict[str, Any]) -> tuple[tuple[str, Suggestions], tuple[str, Suggestions]]:
        """What the first framework runs, and the first that fits. Where none fits: all that has a formula, if
        that was looked through, else the first one twice.
        """
        first = last = None
        for chosen in [runs_with] if runs_with else candidates(model, given):
            try:
                found = suggest(
                    model, devices=devices, device=kind, memory_bytes=memory_bytes, reserve=reserve,
                    count=count, runs_with=chosen, **given,
                )  # fmt: skip
            except EstimateError:
                if first is None:
                    raise
                continue
            last = (chosen, found)
            first = first or last
            if found.fits:
                return first, last
        assert first is not None and last is not None
        return first, last if last[0] == "any" else first

    first, (chosen, found) = look(given)
    refused = first if first[0] != chosen else None
    longest, seq, fitting = found, found.best[0].config.seq, None
    for shorter in (seq >> power for power in range(1, 24)):
        if found.fits or shorter < _SHORTEST:
            break
        _, (other, less) = look(given | {"seq": shorter})
        if less.fits:
            fitting = shorter
            if "seq" not in given:
                chosen, found = other, less
            break
    if json_out:
        data = {
            "fits": found.fits, "tried": found.tried, "fitting": found.fitting, "memory_bytes": memory_bytes,
            "usable_bytes": found.usable_bytes, "for": chosen,
            "full_finetune_bytes": found.whole.reserved_expandable_bytes if found.whole else None,
            "suggestions": [one.to_json() for one in found.best],
            "assumptions": list(ASSUMPTIONS),
        }  # fmt: skip
        typer.echo(json.dumps(data, indent=1))
    else:
        fixed = [
            f"{flag(name)} {value}" for name, value in given.items() if name in VARIED and value is not None
        ]
        if found is not longest:
            least = format_bytes(longest.best[0].reserved_expandable_bytes)
            typer.echo(f"At {seq} tokens it does not fit: it needs {least}. At {fitting} tokens:")
        elif refused:
            least = format_bytes(refused[1].best[0].reserved_expandable_bytes)
            what = "all that has a formula" if chosen == "any" else chosen
            typer.echo(f"With {refused[0]} it does not fit: it needs {least}. With {what}:")
        _show(model, devices, kind, memory_bytes, chosen, found, fixed)
        if fitting and not found.fits:
            typer.echo(f"It fits at {fitting} tokens: give --seq {fitting}.")
        if note := memory_note(memory, device):
            typer.echo(f"note: {note}")
    if not found.fits:
        raise typer.Exit(1)


def _show(
    model: str, devices: int, kind: Any, memory_bytes: int, chosen: str, found: Any, fixed: list[str]
) -> None:
    from rich.console import Console
    from rich.text import Text

    from lowtide.estimate.render import pieces_text, suggestion_table
    from lowtide.estimate.speed import ASSUMPTIONS
    from lowtide.estimate.suggest import ORDER
    from lowtide.estimate.total import RESIDUAL

    console = Console()
    best = found.best[0]
    where = (
        f"{model} at {best.config.seq} tokens on {devices} x {kind.name} of {format_bytes(memory_bytes)} "
        f"({format_bytes(found.usable_bytes)} usable)"
    )
    if found.fits:
        told = f"It fits: {where}. {found.fitting} of {found.tried} configurations do."
        console.print(Text(told, style="bold green"))
        console.print(f"Order: {ORDER}.", highlight=False)
    else:
        told = f"It does not fit: {where}. The least of {found.tried} configurations needs"
        console.print(Text(f"{told} {format_bytes(best.reserved_expandable_bytes)}.", style="bold red"))
        console.print(_to_make_it_fit(chosen, fixed), highlight=False)
    if found.whole:
        whole = format_bytes(found.whole.reserved_expandable_bytes)
        told = f"To train all weights, with the optimizer on the devices, takes {whole} of each at least."
        spared = " The rows below train adapters, or keep the optimizer on the host." if found.fits else ""
        console.print(f"{told}{spared}", highlight=False)
    if chosen == "any":
        looked = "Looked through all that has a formula, whatever runs it"
    else:
        looked = f"Looked through what {chosen} runs (--for any: all that has a formula)"
    console.print(f"{looked}.", highlight=False)
    tokens = best.config.global_batch * best.config.seq
    console.print(
        f"A step is {count_text(best.config.global_batch, 'sequence')} ({tokens:,} tokens) on all devices "
        "together.",
        highlight=False,
    )
    console.print("", Whole(suggestion_table(found)), "", sep="\n")
    console.print(
        "As lowtide estimate says it: t tensor parallel (sp: and sequence parallel), p pipeline stages (x "
        "chunks), d data parallel (c context, e expert parallel), Z ZeRO's stage (--zero), b sequences in a "
        "micro-batch (--micro-batch), GiB reserved on the fullest device with expandable segments, tok/s of "
        "each device. host: GiB of a node's memory for what is offloaded",
        style="dim",
        highlight=False,
    )
    if any(pieces_text(one.config) for one in found.best):
        console.print(
            "pieces: m the MLP and the loss in so many tiles (--tiles), a attention in so many slices of "
            "heads (--head-chunks), A activations (--offload-activations) and W weights "
            "(--offload-weights) on the host, x heads exchanged for tokens (--cp-exchange all-to-all)",
            style="dim",
            highlight=False,
        )
    if any(one.reserved_bytes > one.reserved_expandable_bytes for one in found.best):
        told = "Run with PYTORCH_ALLOC_CONF=expandable_segments:True; without it PyTorch reserves more."
        console.print(told, highlight=False)
    if found.fits and best.command:
        console.print(f"Run the rows with {chosen}:", style="bold")
        for place, one in enumerate(found.best, 1):
            console.print(f"  {place}: {one.command}", soft_wrap=True, highlight=False)
        if "$MASTER_ADDR" in best.command:
            console.print("on every node, with the first node's name in MASTER_ADDR", style="dim")
    console.print("The first row line by line:", style="bold")
    console.print(f"  lowtide estimate --model {model} {best.flags()}", soft_wrap=True, highlight=False)
    residual = (RESIDUAL,) if best.config.dtype == "autocast" else ()
    for note in (*ASSUMPTIONS, *residual):
        console.print(f"assumed: {note}", style="dim", highlight=False)


def _to_make_it_fit(chosen: str, fixed: list[str]) -> str:
    """What to do where nothing fits."""
    given = f"Given and not varied: {', '.join(fixed)}; leave that out. " if fixed else ""
    ways = "Give more --devices, a --device with more memory or a shorter --seq"
    if chosen != "any":
        ways += f"; --for any looks beyond what {chosen} runs"
    if chosen == "lowtide":
        ways += "; lowtide train --optimizer-host-fraction 1 keeps the optimizer's state on the host"
    return f"{given}{ways}."
