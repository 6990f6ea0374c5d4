"""The command line; ``lowtide train`` is here. Mistakes in what the user asked for end
with one line and exit code 2.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lowtide.errors import LowtideError
from lowtide.estimate.command import estimate_command
from lowtide.estimate.simulate_command import simulate_command
from lowtide.estimate.suggest_command import suggest_command
from lowtide.flags import (
    Batch,
    Budget,
    Compile,
    CompileBackend,
    Device,
    Dropout,
    DtypeOption,
    HostBudget,
    LossChunks,
    Model,
    PlanSeconds,
    PolicyName,
    Seq,
    Tiles,
    Unfused,
    budget_asked,
    given_options,
    write_text,
)
from lowtide.progress import mute
from lowtide.steps.commands import plan_command, report_command, trace_command
from lowtide.steps.target import ScriptFailed
from lowtide.version import __version__

# torch and everything on top of it is imported inside the commands, so that --help and --version answer at
# once.

app = typer.Typer(
    help="Make a PyTorch training step fit the memory you have, at the least extra time.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lowtide {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(short_help="Train a language model on text within a memory budget.")
def train(
    context: typer.Context,
    run_folder: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Folder of the run that --resume continues.", show_default=False),
    ] = None,
    model: Model = "gpt-mini",
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained",
            help="Begin with the weights (safetensors) in the folder of --model, or on the hub.",
        ),
    ] = False,
    budget: Budget = None,
    policy: PolicyName = None,
    host_budget: HostBudget = None,
    tiles: Tiles = None,
    plan_seconds: PlanSeconds = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps. A resumed run may have more.")] = 100,
    batch: Batch = 8,
    seq: Seq = 256,
    dtype: DtypeOption = "fp32",
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and dropout.")] = 0,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text to train on: a text file or a folder of them; a .jsonl, .parquet, .csv or .arrow "
            "file; a folder that datasets saved; or hf:OWNER/NAME[:CONFIGURATION]. [default: the source of "
            "Python's standard library]"
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option(help="Column of --data that has the text. [default: text, or the only column]"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="bytes; train or train:8192 (a tokenizer of that size, learned from the text); a "
            "tokenizer.json or its folder; or a name on the hub. [default: the model's own, else bytes]"
        ),
    ] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    lr_schedule: Annotated[
        str,
        typer.Option(
            help="Learning rate after its peak: cosine or linear (both down to a tenth), or constant."
        ),
    ] = "cosine",
    warmup: Annotated[
        int | None,
        typer.Option(help="Steps until the peak learning rate. [default: a tenth of --steps, at least 20]"),
    ] = None,
    weight_decay: Annotated[
        float, typer.Option(help="Weight decay of AdamW. It applies to matrices only.")
    ] = 0.1,
    optimizer_host_fraction: Annotated[
        str | None,
        typer.Option(
            help="Share of AdamW's state on the host (main memory for CUDA, disk for the CPU): 0 to "
            "1, or auto. [default: all on the device]"
        ),
    ] = None,
    grad_accum: Annotated[int, typer.Option(help="Microbatches in each optimizer step.")] = 1,
    clip: Annotated[
        float, typer.Option(help="Norm to which gradients are clipped; 0 for no clipping.")
    ] = 1.0,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0 for one at the end.")] = 50,
    eval_batches: Annotated[int, typer.Option(help="Microbatches in each evaluation.")] = 8,
    device: Device = "cpu",
    dropout: Dropout = None,
    unfused_attention: Unfused = False,
    loss_chunks: LossChunks = None,
    compile: Compile = False,
    compile_backend: CompileBackend = None,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints and plans. The last checkpoint is always saved."),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0 for one at the end.")
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest checkpoint in RUN (--resume runs/first) or in --checkpoint-dir; "
            "without both, of the newest run in the folder runs. Options that you leave out have the values "
            "of that run. --steps may be larger. The first step follows the plan that the run has kept.",
        ),
    ] = False,
    stop_after: Annotated[
        int | None,
        typer.Option(
            help="Stop at this step. --resume continues from there. The learning rate still follows --steps."
        ),
    ] = None,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Measure the plain step and the planned step at the end. [default: yes; with --pp no]",
        ),
    ] = None,
    tp: Annotated[
        int,
        typer.Option(help="Tensor parallel ranks, which split every layer. Start the ranks with torchrun."),
    ] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="The --tp ranks also split the sequence.")
    ] = False,
    cp: Annotated[int, typer.Option(help="Context parallel ranks, which share every sequence.")] = 1,
    cp_exchange: Annotated[
        str, typer.Option(help="What the --cp ranks exchange in attention: ring, all-to-all, auto.")
    ] = "auto",
    dp: Annotated[int, typer.Option(help="Data parallel ranks, which split each microbatch.")] = 1,
    shard_parameters: Annotated[
        bool,
        typer.Option(
            "--shard-parameters",
            help="The --dp and --cp ranks also shard parameters, gradients and optimizer state (FSDP2).",
        ),
    ] = False,
    dp_replicate: Annotated[
        int,
        typer.Option(
            help="Number of groups of ranks, each with all shards (HSDP): --dp 8 --dp-replicate 2 makes two "
            "groups of four ranks."
        ),
    ] = 1,
    pp: Annotated[
        int,
        typer.Option(help="Pipeline ranks. --grad-accum is then the number of microbatches of the schedule."),
    ] = 1,
    schedule: Annotated[
        str | None,
        typer.Option(help="Pipeline schedule: 1f1b, gpipe, interleaved, zero-bubble, zbv. [default: 1f1b]"),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for TensorBoard (needs tensorboard).")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this file.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a report of one step: a page (.html), or another format of lowtide report."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print no progress, no table and no picture.")
    ] = False,
) -> None:
    """Train a language model on text within a memory budget, and show the memory and the time of a step."""
    asked: dict[str, Any] = dict(locals())  # every option by its name
    del asked["context"], asked["quiet"], asked["run_folder"]
    from rich.console import Console

    from lowtide.report import save_report
    from lowtide.train.options import TrainOptions
    from lowtide.train.progress import Progress
    from lowtide.train.resume import named_folder, options_to_resume
    from lowtide.train.summary import show
    from lowtide.train.trainer import train as run

    asked |= dict(
        budget=budget_asked(budget, policy),
        raise_budget=budget is None,
        optimizer_host_fraction=_share(optimizer_host_fraction),
        json=asked.pop("json_file"),
    )
    asked["checkpoint_dir"] = named_folder(run_folder, resume, checkpoint_dir)
    if resume:
        asked = options_to_resume(asked, given_options(context))
    if asked["warmup"] is None:
        asked["warmup"] = min(asked["steps"], max(20, asked["steps"] // 10))
    with mute() if quiet else nullcontext():
        options = TrainOptions(**asked)
    first = os.environ.get("RANK", "0") == "0"  # the others' results are in its
    console = Console(quiet=quiet or not first)
    progress = Progress(console)
    try:
        with mute() if quiet else nullcontext():
            result = run(options, progress)
    finally:
        progress.finish()
    if first and options.json is not None:
        write_text(options.json, json.dumps(result.to_json(), indent=1) + "\n")
    if first and result.report is not None and options.report is not None:
        save_report(result.report, options.report)
    show(result, console)
    if result.stopped:
        raise typer.Exit(130)


@app.command(short_help="Check whether this machine is ready.")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check what lowtide needs on this machine, and say what to do about each problem."""
    from lowtide.doctor import examine

    found = examine()
    data = {"findings": [asdict(finding) for finding in found]}
    typer.echo(json.dumps(data, indent=1) if as_json else "\n".join(map(str, found)))
    if any(finding.state == "problem" for finding in found):
        raise typer.Exit(1)


app.command("plan", short_help="Plan a training step without running it.")(plan_command)
app.command("estimate", short_help="Estimate a step's bytes and FLOPs by closed formulas.")(estimate_command)
app.command("simulate", short_help="Trace a step of any size without a GPU.")(simulate_command)
app.command("suggest", short_help="Suggest parallel sizes and more that fit.")(suggest_command)
app.command("trace", short_help="Show what a plain step takes.")(trace_command)
app.command("report", short_help="Show a planned step on a page.")(report_command)


def _share(text: str | None) -> float | Literal["auto"] | None:
    """``auto``, or a number from 0 to 1."""
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    try:
        return float(text)
    except ValueError:
        raise LowtideError(
            f"--optimizer-host-fraction {text}: choose auto, or a number from 0 to 1"
        ) from None


def main() -> None:
    """The command line; exits with 2 for what the user can mend, 130 when interrupted."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app()
    except LowtideError as error:
        _fail(str(error))
    except ScriptFailed as failed:
        traceback.print_exception(failed.error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except MemoryError as error:
        _fail(f"out of memory: {error}")
    except Exception as error:
        if "allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError":
            _fail(
                f"the machine is out of memory ({str(error).splitlines()[0]}): lower --budget, --batch or "
                "--seq, or choose a smaller --model"
            )
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # leaving in order would wait for the other processes


_plain_warning = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    """Our own warnings as one line without a place in the code; others as ever."""
    if category.__name__ == "LowtideWarning":
        print(f"lowtide: {str(message).removeprefix('lowtide ')}", file=sys.stderr)
    else:
        _plain_warning(message, category, *rest, **more)


def _fail(message: str) -> None:
    """One line, and the end; a process among several says which it is, and does not wait for the others to
    leave their group.
    """
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    print(
        f"lowtide: {message}" if size == "1" else f"lowtide, rank {rank}: {message}",
        file=sys.stderr,
        flush=True,
    )
    if size != "1":
        os._exit(2)
    sys.exit(2)
