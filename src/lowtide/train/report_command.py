"""The command ``lowtide report``. It imports no torch before it is called."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.errors import LowtideError
from lowtide.flags import (
    Batch,
    Budget,
    Dropout,
    DtypeOption,
    LossChunks,
    Model,
    PlanDevice,
    Policy,
    Seq,
    Unfused,
    budget_asked,
)
from lowtide.progress import muted

if TYPE_CHECKING:
    from lowtide.report import Report


def report_command(
    context: typer.Context,
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run's folder or results file (lowtide train --json), or a report's .json. Without it, a "
            "step is planned as by lowtide plan, and not run."
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write: .html (a page), .png, .pdf or .svg (a picture), .pickle (for PyTorch's "
            "memory viewer), .json (the data). Several may be given. [default: report.html]",
        ),
    ] = None,
    model: Model = "gpt-small",
    budget: Budget = None,
    policy: Policy = None,
    batch: Batch = 8,
    seq: Seq = 256,
    dtype: DtypeOption = "fp32",
    device: PlanDevice = "cpu",
    dropout: Dropout = None,
    unfused_attention: Unfused = False,
    loss_chunks: LossChunks = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing.")] = False,
) -> None:
    """Show a step and its plan on a page: what stands in memory when, what the plan decides, what it
    costs."""
    from lowtide.report import check_ending, make_report, save_report

    files = out or [Path("report.html")]
    for file in files:
        check_ending(file)
    if run is not None:
        _refuse_step(context)
        report = saved_report(run)
    else:
        from lowtide.train.planning import PlanOptions, traced_and_planned

        options = PlanOptions(
            model=model,
            budget=budget_asked(budget, policy),
            raise_budget=budget is None,
            policy=policy,
            batch=batch,
            seq=seq,
            dtype=dtype,
            device=device,
            dropout=dropout,
            unfused_attention=unfused_attention,
            loss_chunks=loss_chunks,
        )
        with muted() if quiet else nullcontext():
            graph, plan = traced_and_planned(options)
            report = make_report(graph, plan, title=f"{model}, {batch} x {seq} tokens, {dtype}")
    for file in files:
        save_report(report, file)
        if not quiet:
            typer.echo(f"report in {file} ({report.title})")


def saved_report(run: Path) -> Report:
    """The report that a run left.

    Args:
        run: its folder, its results, or a report's own ``.json``.

    Raises:
        LowtideError: there is none.
    """
    from lowtide.report import Report

    file = run / "results.json" if run.is_dir() else run
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LowtideError(
            f"cannot read {str(file)!r} ({error.strerror or error}): give the folder or the file that "
            "lowtide train --json wrote, or no file to plan a step as lowtide plan does"
        ) from None
    except ValueError:
        raise LowtideError(f"{str(file)!r} is no JSON: give what lowtide train --json wrote") from None
    if isinstance(data, dict) and data.get("lowtide") == "train":
        data = data.get("report")
        if data is None:
            raise LowtideError(
                f"the run in {str(file)!r} has nothing to report on: it ended before its comparison, or ran "
                "with --no-compare, --pp or --shard-parameters"
            )
    return Report.from_json(data)


def _refuse_step(context: typer.Context) -> None:
    """Options of a step to plan say nothing about a run that is over."""
    own = {"run", "out", "quiet"}
    sources = {name: context.get_parameter_source(name) for name in context.params if name not in own}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise LowtideError(f"{flags}: the report is of a run that is there; leave this out, or the run")
