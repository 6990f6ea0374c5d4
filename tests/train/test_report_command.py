"""Pages of a run, of a step that is planned and not run, and of a handle; and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide import cli
from lowtide.errors import PlanError
from lowtide.report.timeline import KINDS
from lowtide.train.options import OptionError, TrainOptions

SMALL = ["--model", "gpt-nano", "--batch", "8", "--seq", "128"]


def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lowtide", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, errors = capsys.readouterr()
    return int(exit_.value.code or 0), out, errors


def embedded(text: str) -> dict[str, Any]:
    """The data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_a_run_leaves_a_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ["--json", str(tmp_path / "results.json"), "--report", str(tmp_path / "report.html")]
    code, out, errors = main(monkeypatch, capsys, "train", *SMALL, "--steps", "1", "--budget", "70%", *files)
    assert code == 0, errors
    assert f"report in {tmp_path / 'report.html'}" in out.replace("\n", "")
    assert "gpt-nano, 8 x 128 tokens, fp32 - lowtide report" in (tmp_path / "report.html").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    data = embedded((tmp_path / "report.html").read_text())
    assert data["summary"]["predicted_peak_bytes"] == results["comparison"]["predicted_peak_bytes"]
    for way in ("plain", "planned"):
        assert data[f"measured_{way}"]["peak_bytes"] == results["comparison"][way]["peak_bytes"]
    plain = data["measured_plain"]
    assert max(live for _, live in plain["curve"]) == plain["peak_bytes"]
    assert any(label[0] == KINDS.index("optimizer") for label in data["labels"])
    assert len(data["points"]) > 1


def test_a_step_is_planned_and_shown_without_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = [tmp_path / "step.html", tmp_path / "step.pickle"]
    outs = [word for file in files for word in ("-o", str(file))]
    code, out, errors = main(monkeypatch, capsys, "report", *SMALL, "--budget", "70%", *outs)
    assert code == 0, errors
    which = "(gpt-nano, 8 x 128 tokens, fp32)"
    assert out.splitlines() == [f"report in {file} {which}" for file in files]
    data = embedded(files[0].read_text())
    assert data["measured_planned"] is None
    modules = {data["texts"][label[1]] for label in data["labels"]}
    assert modules >= {"blocks.0.mlp.down", "blocks.1.mlp.down"}
    assert files[1].stat().st_size > 1000
    outs = ["-o", str(files[0]), "--quiet"]
    assert main(monkeypatch, capsys, "report", *SMALL, "--budget", "70%", *outs)[:2] == (0, "")


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
    assert handle.report(tmp_path / "page.html", title="my step") == tmp_path / "page.html"
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


def test_other_budgets_are_planned_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, and are of the step alone, whatever its budget."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    handle = lowtide.limit_memory(model, "100%")
    model(torch.randn(512, 64)).sum().backward()
    first = handle.make_report()
    monkeypatch.setattr("lowtide.report.tradeoff.search_of", None)
    handle.set_budget("95%")
    assert len(first.points) > 1 and handle.make_report().points is first.points
    handle.remove()
    assert "removed" in handle._repr_html_() and "<pre>plan" in handle._repr_html_()


def test_gradients_that_are_added_to_stand_as_such() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    handle = lowtide.limit_memory(model, "100%")
    for _ in range(2):  # the second step adds to what the first left
        model(torch.randn(512, 64)).sum().backward()
    spans = handle.make_report(points=()).plain.spans
    handle.remove()
    resident = sum(span.bytes for span in spans if span.kind == "gradient")
    assert resident == sum(parameter.nbytes for parameter in model.parameters())
    assert sum(span.bytes for span in spans if span.kind == "parameter") == resident
