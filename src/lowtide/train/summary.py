"""The end of a run on the terminal: the plain and the planned step side by side, and the picture of both."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from lowtide.budget import format_bytes
from lowtide.plan.data import Plan
from lowtide.report import terminal_picture
from lowtide.train.compare import Comparison
from lowtide.train.progress import say
from lowtide.train.result import TrainResult
from lowtide.words import count_text, percent_text, seconds_text, seconds_texts

PICTURE_WIDTH = 96

_ROUNDS = (
    "because Inductor rounds differently when it fuses other operations; --compile-backend aot_eager "
    "is compared bit by bit"
)


def show(result: TrainResult, console: Console) -> None:
    """Print everything that a run found."""
    console.print()
    say(console, _losses(result))
    for rank in result.ranks:
        say(console, _rank(rank))
    comparison = result.comparison
    if comparison is not None:
        console.print(_table(result, comparison))
        if _draws_blocks(console):
            curves = [
                measured.curve for measured in (comparison.plain, comparison.planned) if measured is not None
            ]
            console.print("live memory over one step")
            width = min(console.width, PICTURE_WIDTH)
            console.print(terminal_picture(curves, comparison.plan.budget_bytes, width), soft_wrap=True)
    for what, file in (
        ("results", result.options.json),
        ("report", result.options.report if result.report is not None else None),
    ):
        if file is not None:
            say(console, f"{what} in {file}")
    folder = result.options.checkpoint_dir
    if folder is not None:
        say(console, f"checkpoints in {folder}")


def _losses(result: TrainResult) -> str:
    words = [f"{count_text(len(result.losses), 'step')} in {seconds_text(sum(result.step_seconds))}"]
    if result.losses:
        words.append(f"training loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")
    if result.validation:
        words.append(f"validation loss {result.validation[-1][1]:.3f}")
    if result.step_peak_bytes:
        words.append(
            f"most live memory {format_bytes(max(result.step_peak_bytes))} (step {result.worst_step})"
        )
        if result.budget_bytes is not None:
            words.append(_held(result))
    if result.stopped:
        words.append(f"stopped after step {result.last_step}")
    return ", ".join(words)


def _held(result: TrainResult) -> str:
    """Whether every step stayed within the budget, and if not, which went furthest beyond."""
    assert result.budget_bytes is not None
    budget, over, steps = (
        format_bytes(result.budget_bytes),
        result.steps_over_budget,
        len(result.step_peak_bytes),
    )
    if not over:
        return f"budget {budget} held in every step"
    return (
        f"[red]budget {budget} exceeded in {len(over)} of {count_text(steps, 'step')}, most in step "
        f"{result.worst_step}[/red]"
    )


def _rank(rank: dict[str, Any]) -> str:
    """One of several processes: what it took, under which budget, and its micro-batches in flight."""
    peaks = rank["step_peak_bytes"]
    worst = peaks.index(max(peaks)) + rank["first_step"] + 1 if peaks else 0
    words = [f"most live memory {format_bytes(max(peaks))} (step {worst})" if peaks else "memory not counted"]
    if rank.get("budget_bytes") is not None:
        held = (
            {True: " held", False: " [red]exceeded[/red]"}[max(peaks) <= rank["budget_bytes"]]
            if peaks
            else ""
        )
        words.append(f"budget {format_bytes(rank['budget_bytes'])}{held}")
    if "in_flight" in rank:
        batches = count_text(rank["in_flight"], "micro-batch", "micro-batches")
        again = count_text(rank.get("recomputed", 0), "operation")
        words.append(f"{batches} in flight, {again} recomputed in a step")
    return f"{rank['name']}: {', '.join(words)}"


def _table(result: TrainResult, comparison: Comparison) -> Table:
    plan, plain, planned = comparison.plan, comparison.plain, comparison.planned
    table = Table(
        title=f"one step, {result.options.batch} x {result.options.seq} tokens, policy {plan.policy}"
        + ", compiled" * result.options.compile,
        title_justify="left",
    )
    for column in ("", "plain step", "planned step", "change"):
        table.add_column(column, justify="left" if not column else "right")
    unknown = "does not fit"

    def row(name: str, plain_text: str, planned_text: str, ratio: str = "") -> None:
        table.add_row(name, plain_text, planned_text, ratio)

    budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    if result.steps_over_budget and result.worst_step is not None:
        within = f"[red]exceeded, most in step {result.worst_step}[/red]"
    else:
        unknown_yet = "" if result.budget_bytes is None else "not counted"
        within = {True: "held", False: "[red]exceeded[/red]", None: unknown_yet}[result.within_budget]
    row("budget", "", budget, within)
    row(
        "peak, predicted",
        format_bytes(plan.plain_peak_bytes),
        format_bytes(plan.predicted_peak_bytes),
        _change(plan.predicted_peak_bytes, plan.plain_peak_bytes),
    )
    row(
        "peak, measured",
        format_bytes(plain.peak_bytes) if plain else unknown,
        format_bytes(planned.peak_bytes),
        _change(planned.peak_bytes, plain.peak_bytes) if plain else "",
    )
    times = seconds_texts(*(one.seconds for one in (plain, planned) if one))
    row(
        "time",
        times[0] if plain else unknown,
        times[-1],
        percent_text(comparison.extra) if comparison.extra is not None else "",
    )
    table.caption = _of_times(plan, comparison)
    table.caption_justify = "left"
    row("optimality gap", "", f"{seconds_text(plan.gap_seconds)}", f"{plan.gap * 100:.2f} %")
    if comparison.different is None:
        equal = "not compared"
    elif comparison.different:
        shown = ", ".join(comparison.different[:3]) + (" ..." if len(comparison.different) > 3 else "")
        differ = f"no: {len(comparison.different)} differ ({shown})"
        rounds = result.options.compile and result.options.compile_backend in (None, "inductor")
        equal = f"{differ}, {_ROUNDS}" if rounds else f"[red]{differ}[/red]"
    else:
        equal = "[green]yes[/green]"
    row("bitwise equal", "", equal)
    return table


def _of_times(plan: Plan, comparison: Comparison) -> str:
    """What the row of times means, and what was forecast in its place."""
    forecast, base = percent_text(plan.predicted_extra), plan.calibrated_plain_seconds
    calibrated = ""
    if base and plan.calibrated_extra_seconds is not None:
        calibrated = f", {percent_text(plan.calibrated_extra_seconds / base)} as the run's own steps took"
    pair = "of the pair of steps with the median change"
    shown = "the median of measured steps" if comparison.extra is None else pair
    return f"time: {shown}; {forecast} was forecast before any step{calibrated}"


def _change(now: float, before: float) -> str:
    return percent_text(now / before - 1) if before else ""


def _draws_blocks(console: Console) -> bool:
    try:
        "▁█┄".encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
