"""The command ``lowtide report``. It imports no torch before it is called."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.flags import (
    Batch,
    Budget,
    Dropout,
    LossChunks,
    Model,
    PlanDevice,
    PlanDtype,
    PolicyName,
    Seq,
    Unfused,
    budget_asked,
)
from lowtide.progress import mute


def report_command(
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write: .html (a page), .png, .pdf or .svg (a picture), .pickle (for PyTorch's "
            "memory viewer). Several may be given. [default: report.html]",
        ),
    ] = None,
    model: Model = "gpt-small",
    budget: Budget = None,
    policy: PolicyName = None,
    batch: Batch = 8,
    seq: Seq = 256,
    dtype: PlanDtype = None,
    device: PlanDevice = "cpu",
    dropout: Dropout = None,
    unfused_attention: Unfused = False,
    loss_chunks: LossChunks = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing.")] = False,
) -> None:
    """Plan a step as ``lowtide plan`` does, and show it on a page: what is in memory when, what the plan
    decides, what it costs. ``lowtide train --report`` shows one that ran.
    """
    asked: dict[str, Any] = dict(locals())  # every option by its name
    del asked["out"], asked["quiet"]
    asked |= dict(budget=budget_asked(budget, policy), raise_budget=budget is None)
    from lowtide.report import check_path, make_report, save_report

    files = out or [Path("report.html")]
    for file in files:
        check_path(file)
    from lowtide.train.planning import PlanOptions, trace_and_plan

    options = PlanOptions(**asked)
    with mute() if quiet else nullcontext():
        graph, plan = trace_and_plan(options)
        report = make_report(graph, plan, title=f"{model}, {batch} x {seq} tokens, {options.precision}")
    for file in files:
        save_report(report, file)
        if not quiet:
            typer.echo(f"report in {file} ({report.title})")
