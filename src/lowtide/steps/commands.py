"""The commands ``lowtide plan``, ``trace`` and ``report``. They import no torch before they are called."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.errors import LowtideError
from lowtide.flags import (
    Batch,
    Budget,
    Compile,
    CompileBackend,
    Dropout,
    HostBudget,
    LossChunks,
    Model,
    PlanDevice,
    PlanDtype,
    PlanSeconds,
    PolicyName,
    Script,
    Seq,
    Tiles,
    Unfused,
    budget_asked,
    given_options,
    write_text,
)
from lowtide.progress import mute, working
from lowtide.words import count_text, format_bytes

if TYPE_CHECKING:
    from lowtide.graph import StepGraph
    from lowtide.plan.data import Plan

_PRESET = (
    "model", "batch", "seq", "dtype", "dropout", "unfused_attention", "loss_chunks", "compile",
    "compile_backend",
)  # fmt: skip
"""Options that shape the step of a preset."""


def plan_command(
    context: typer.Context,
    script: Script = None,
    model: Model = "gpt-small",
    budget: Budget = None,
    policy: PolicyName = None,
    host_budget: HostBudget = None,
    tiles: Tiles = None,
    plan_seconds: PlanSeconds = None,
    batch: Batch = 8,
    seq: Seq = 256,
    dtype: PlanDtype = None,
    device: PlanDevice = "cpu",
    dropout: Dropout = None,
    unfused_attention: Unfused = False,
    loss_chunks: LossChunks = None,
    compile: Compile = False,
    compile_backend: CompileBackend = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Save the plan to this file.")] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print no progress, no table and no picture.")
    ] = False,
) -> None:
    """Make a plan for one training step, without running it, and explain the plan.

    The step is that of a model, or of your own script. A plan for a script is the plan of limit_memory.
    """
    asked: dict[str, Any] = dict(locals())  # every option by its name
    asked |= dict(
        budget=budget_asked(budget, policy), raise_budget=budget is None, json=asked.pop("json_file")
    )
    with _silence(quiet):
        if script is not None:
            made = _of_script(asked)[1]
        else:
            from lowtide.train.planning import PlanOptions, make_plan

            made = make_plan(PlanOptions(**_of_preset(asked)))
    if json_file is not None:
        write_text(json_file, made.to_json())
    if not quiet:
        # of a terminal, or as COLUMNS says; a file takes lines of any length
        typer.echo(str(made))


def trace_command(
    context: typer.Context,
    script: Script = None,
    model: Model = "gpt-small",
    batch: Batch = 8,
    seq: Seq = 256,
    dtype: PlanDtype = None,
    device: PlanDevice = "cpu",
    dropout: Dropout = None,
    unfused_attention: Unfused = False,
    loss_chunks: LossChunks = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Save the step graph to this file.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress and no table.")] = False,
) -> None:
    """Show the memory and the time of one plain step, by module.

    lowtide.StepGraph.from_json reads the JSON file.
    """
    asked: dict[str, Any] = dict(locals())
    asked |= dict(budget=None, policy="keep_all", json=asked.pop("json_file"))
    with _silence(quiet), working("tracing", "traced") as work:
        graph, plan = _graph_and_plan(asked)
        took = f"{format_bytes(plan.plain_peak_bytes)} at the peak"
        work.done(f"{count_text(len(graph.operations), 'operation')}, {took}")
    if json_file is not None:
        write_text(json_file, json.dumps(graph.to_json()))
    if not quiet:
        from lowtide.steps.traced import in_text

        typer.echo(in_text(graph, plan))


def report_command(
    context: typer.Context,
    script: Script = None,
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
    host_budget: HostBudget = None,
    tiles: Tiles = None,
    batch: Batch = 8,
    seq: Seq = 256,
    dtype: PlanDtype = None,
    device: PlanDevice = "cpu",
    dropout: Dropout = None,
    unfused_attention: Unfused = False,
    loss_chunks: LossChunks = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
) -> None:
    """Make a plan as lowtide plan does, and draw it on a page: live memory over time, decisions, extra time.

    lowtide train --report draws a step that ran.
    """
    asked: dict[str, Any] = dict(locals())
    asked |= dict(budget=budget_asked(budget, policy), raise_budget=budget is None)
    from lowtide.report import check_path, make_report, save_report

    files = out or [Path("report.html")]
    for file in files:
        check_path(file)
    with _silence(quiet):
        graph, plan = _graph_and_plan(asked)
        report = make_report(graph, plan, title=_title(asked))
    for file in files:
        save_report(report, file)
        if not quiet:
            typer.echo(f"report in {file} ({report.title})")


def _graph_and_plan(asked: dict[str, Any]) -> tuple[StepGraph, Plan]:
    """The step graph and the plan that a command shows.

    Raises:
        LowtideError: there is none.
    """
    if asked["script"] is None:
        from lowtide.train.planning import PlanOptions, trace_and_plan

        return trace_and_plan(PlanOptions(**_of_preset(asked)))
    graph, plan = _of_script(asked)
    if graph is None:
        raise LowtideError(
            "the plan of this compiled model comes from PyTorch's cache on disk, which has no step graph: "
            "set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )
    return graph, plan


def _of_preset(asked: dict[str, Any]) -> dict[str, Any]:
    """The options of a preset's step."""
    return {name: item for name, item in asked.items() if name not in ("context", "script", "out", "quiet")}


def _of_script(asked: dict[str, Any]) -> tuple[StepGraph | None, Plan]:
    """The step of a script, and its plan.

    Raises:
        LowtideError: an option does not go with a script, or what `trace_and_plan_script` raises.
    """
    given = given_options(asked["context"])
    if shapes := [f"--{name.replace('_', '-')}" for name in _PRESET if name in given]:
        several = len(shapes) > 1
        raise LowtideError(
            f"{', '.join(shapes)} {'shape' if several else 'shapes'} the step of a preset, and "
            f"{asked['script']} has a step of its own: leave {'them' if several else 'it'} out"
        )
    from lowtide.steps.planning import ScriptOptions, trace_and_plan_script

    names = ("script", "budget", "raise_budget", "policy", "host_budget", "tiles", "plan_seconds", "json")
    device = asked["device"] if "device" in given else None
    options = {name: asked[name] for name in names if name in asked}
    return trace_and_plan_script(ScriptOptions(**options, device=device))


def _title(asked: dict[str, Any]) -> str:
    """Which step it is."""
    if asked["script"] is not None:
        return asked["script"]
    from lowtide.train.planning import PlanOptions

    precision = PlanOptions(**_of_preset(asked)).precision
    return f"{asked['model']}, {asked['batch']} x {asked['seq']} tokens, {precision}"


def _silence(quiet: bool) -> AbstractContextManager[Any]:
    return mute() if quiet else nullcontext()
