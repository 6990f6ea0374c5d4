"""``lowtide report``: from a run, from a step that is planned, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import cli
from lowtide.errors import PlanError
from lowtide.report import Report
from lowtide.train.options import OptionError, TrainOptions
from lowtide.train.report_command import saved_report

SMALL = ["--model", "gpt-nano", "--batch", "8", "--seq", "128"]


def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lowtide", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, errors = capsys.readouterr()
    return int(exit_.value.code or 0), out, errors


def test_a_run_leaves_a_page_and_what_other_files_are_made_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ["--json", str(tmp_path / "results.json"), "--report", str(tmp_path / "report.html")]
    code, out, errors = main(monkeypatch, capsys, "train", *SMALL, "--steps", "1", "--budget", "70%", *files)
    assert code == 0, errors
    assert f"report in {tmp_path / 'report.html'}" in out.replace("\n", "")
    assert "gpt-nano, 8 x 128 tokens, fp32 - lowtide report" in (tmp_path / "report.html").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    report = Report.from_json(results["report"])
    assert report.summary["predicted_peak_bytes"] == results["comparison"]["predicted_peak_bytes"]
    assert report.measured_planned is not None and report.measured_plain is not None
    assert report.measured_planned.peak_bytes == results["comparison"]["planned"]["peak_bytes"]
    assert (
        max(live for _, live in report.measured_plain.curve) == results["comparison"]["plain"]["peak_bytes"]
    )
    assert any(span.kind == "optimizer" for span in report.planned.spans)
    assert len(report.points) > 1

    again = tmp_path / "again"
    outs = ["-o", f"{again}.html", "-o", f"{again}.pickle"]
    code, out, errors = main(monkeypatch, capsys, "report", str(tmp_path), *outs)
    assert code == 0, errors
    which = "(gpt-nano, 8 x 128 tokens, fp32)"
    assert out.splitlines() == [f"report in {again}.html {which}", f"report in {again}.pickle {which}"]
    assert Path(f"{again}.html").read_text() == (tmp_path / "report.html").read_text()
    code, _, errors = main(monkeypatch, capsys, "report", str(tmp_path), "--batch", "4")
    assert (code, errors.strip()) == (
        2,
        "lowtide: --batch: the report is of a run that is there; leave this out, or the run",
    )


def test_a_step_is_planned_and_shown_without_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "step.json"
    code, out, errors = main(
        monkeypatch, capsys, "report", *SMALL, "--budget", "70%", "-o", str(file), "--quiet"
    )
    assert (code, out) == (0, ""), errors
    report = saved_report(file)
    assert report.title == "gpt-nano, 8 x 128 tokens, fp32"
    assert report.measured_planned is None
    assert {span.module for span in report.planned.spans} >= {"blocks.0.mlp.down", "blocks.1.mlp.down"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*results.json"),
        ("no json", "is no JSON"),
        ('{"lowtide": "train", "report": null}', "has nothing to report on"),
        ('{"lowtide": "plan"}', "is no lowtide report"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(lowtide.LowtideError, match=message):
        saved_report(tmp_path)


def test_names_and_runs_that_cannot_have_a_report_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(lowtide.LowtideError, match=r"ends in \.html"):
        TrainOptions(report=tmp_path / "report.txt")
    with pytest.raises(OptionError, match="leave out --no-compare"):
        TrainOptions(report=tmp_path / "report.html", compare=False)


def test_a_handle_writes_a_page(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    handle = lowtide.limit_memory(model, "100%", optimizer=optimizer)
    with pytest.raises(PlanError, match="there is no plan to report on yet"):
        handle.report(tmp_path / "page.html")
    for _ in range(2):
        model(torch.randn(512, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.report(tmp_path / "page.html", title="my step")
    assert "<title>my step - lowtide report</title>" in (tmp_path / "page.html").read_text()
    report = handle.make_report(points=())
    handle.remove()
    assert handle.plan is not None
    assert report.planned.peak_bytes == handle.plan.predicted_peak_bytes
    kinds = {span.kind for span in report.plain.spans}
    assert {"parameter", "optimizer", "gradient", "activation"} <= kinds
    gradients = {
        f"{s.module}.{s.name.removeprefix('gradient of ')}"
        for s in report.plain.spans
        if s.kind == "gradient"
    }
    assert gradients == {name for name, _ in model.named_parameters()}


def test_gradients_that_are_added_to_stand_as_such() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    handle = lowtide.limit_memory(model, "100%")
    for _ in range(2):  # the second step adds to what the first left
        model(torch.randn(512, 64)).sum().backward()
    spans = handle.make_report(points=()).plain.spans
    handle.remove()
    standing = sum(span.bytes for span in spans if span.kind == "gradient")
    assert standing == sum(parameter.nbytes for parameter in model.parameters())
    assert sum(span.bytes for span in spans if span.kind == "parameter") == standing
