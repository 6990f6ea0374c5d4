"""The table at the end of a run: what it prints can be checked from what stands beside it."""

from __future__ import annotations

import dataclasses
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import lowtide
from lowtide.meter import Measurement
from lowtide.report.picture import Curve
from lowtide.train.compare import Comparison, Measured, median_pair
from lowtide.train.options import TrainOptions
from lowtide.train.progress import Progress
from lowtide.train.result import TrainResult
from lowtide.train.summary import show


def shown(
    plain: Measured | None,
    planned: Measured,
    plan: lowtide.Plan | None = None,
    options: TrainOptions | None = None,
    different: tuple[str, ...] = (),
) -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    plan = plan or lowtide.plan(
        lowtide.trace(lambda x: model(x).sum(), torch.randn(4, 8), model=model, costs=False),
        policy="keep_all",
    )
    options = options or TrainOptions(data=Path("text"))
    comparison = Comparison(plan, planned, plain, different)
    result = TrainResult(options, "text", 1, 0, comparison=comparison)
    console = Console(file=StringIO(), width=110)
    show(result, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def measured(seconds: float) -> Measured:
    return Measured(100, seconds, Curve("", [(0.0, 0), (seconds, 100)]))


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"\u2502 {name}")]
    return [cell.strip() for cell in line.strip("\u2502").split("\u2502")]


def test_one_row_has_the_time_and_its_change_is_that_of_the_two_times_shown() -> None:
    text = shown(measured(0.930), measured(1.040))
    assert row(text, "time") == ["time", "930 ms", "1,040 ms", "+11.8 %"]
    assert "of the pair of steps with the median change" in " ".join(text.split())


def test_a_gap_below_a_microsecond_is_none() -> None:
    step = lambda x: (x * x).sum()  # noqa: E731
    graph = lowtide.trace(step, torch.randn(4, 8, requires_grad=True), costs=False)
    plan = lowtide.plan(graph, policy="keep_all")
    text = shown(measured(1.0), measured(1.0), dataclasses.replace(plan, bound_extra_seconds=-8.96e-8))
    assert row(text, "optimality gap")[2] == "0 ms"


def test_what_inductor_rounds_is_told_from_a_fault() -> None:
    for backend, rounds in ((None, True), ("aot_eager", False)):
        options = TrainOptions(data=Path("text"), budget="100%", compile=True, compile_backend=backend)
        text = " ".join(
            shown(measured(1.0), measured(1.0), None, options, ("loss",)).replace("│", "").split()
        )
        assert "no: 1 differ (loss)" in text
        assert ("Inductor rounds differently" in text) is rounds


def test_the_times_are_those_of_the_pair_with_the_median_change() -> None:
    """Where noise slows both steps of some pairs, two medians of their own contradict the change of pairs."""
    seconds = [(1.0, 1.1), (1.0, 1.1), (4.0, 4.4), (1.05, 1.5), (2.0, 1.9)]
    pairs = [tuple(Measurement(0, 0, (), one, None, "profiler") for one in pair) for pair in seconds]
    plain, planned = median_pair(pairs)  # type: ignore[arg-type]
    assert abs(planned.seconds / plain.seconds - 1.1) < 1e-9


def test_nothing_is_paired_where_the_plain_step_does_not_fit() -> None:
    text = shown(None, measured(1.040))
    assert row(text, "time")[1:] == ["does not fit", "1.04 s", ""] and "pairs" not in text


def test_the_report_names_the_worst_of_the_steps_over_the_budget() -> None:
    mib = 2**20
    result = TrainResult(
        TrainOptions(), "text", 1, 0, budget_bytes=11 * mib, losses=[1.0] * 3, step_seconds=[1.0] * 3
    )
    console = Console(file=StringIO(), width=200)
    result.step_peak_bytes = [24 * mib, 25 * mib, 10 * mib]
    show(result, console)
    result.step_peak_bytes = [10 * mib] * 3
    show(result, console)
    written = console.file.getvalue()  # type: ignore
    exceeded, held = (line for line in written.splitlines() if "budget" in line)
    assert (
        "most live memory 25 MiB (step 2), budget 11 MiB exceeded in 2 of 3 steps, most in step 2" in exceeded
    )
    assert "budget 11 MiB held in every step" in held


def test_forecast_and_calibrated_times_stand_below_the_measured_one() -> None:
    graph = lowtide.trace(
        lambda x: nn.functional.gelu(x).sum(), torch.randn(4, 8, requires_grad=True), costs=False
    )
    plan = dataclasses.replace(
        lowtide.plan(graph, policy="keep_all"), plain_seconds=1.0, predicted_extra_seconds=0.1
    )
    text = " ".join(shown(None, measured(1.0), plan).split())
    assert "+10.0 % was forecast before any step" in text and "own steps" not in text
    text = " ".join(shown(None, measured(1.0), plan.calibrated(2.0, 0.5)).split())
    assert "+10.0 % was forecast before any step, +25.0 % as the run's own steps took" in text


def test_the_speed_that_is_shown_is_that_of_steps_that_do_not_plan() -> None:
    console = Console(file=StringIO())
    progress = Progress(console)
    progress.start(0, 6, "a run")
    for done, speed in enumerate((10.0, 100.0, 1000.0, 1000.0, 1000.0, 1000.0), start=1):
        progress.step(done, 1.0, speed, None)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert " 10 tokens/s" in lines[1] and " 100 tokens/s" in lines[2] and " 1,000 tokens/s" in lines[-1]
