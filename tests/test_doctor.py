"""`lowtide doctor`: it finds what is there, and says what to do about what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lowtide import __version__, doctor
from lowtide.cli import app
from lowtide.doctor import Finding


def found() -> dict[str, Finding]:
    return {finding.subject: finding for finding in doctor.examine()}


def test_everything_is_looked_at() -> None:
    here = found()
    assert here["lowtide"].found.startswith(__version__)
    assert here["PyTorch"].found == torch.__version__
    assert "free" in here["cpu"].found
    assert {"C++ compiler", "meter on the CPU", "CUDA"} <= here.keys()
    assert all(finding.means for finding in here.values())


def test_the_allocator_is_recommended_by_what_a_step_reserves() -> None:
    default, expandable = 6 << 30, 5 << 30
    told = doctor._reserves("", 4 << 30, default, expandable)
    assert told.state == "note" and "expandable_segments:True" in told.fix
    assert "4 GiB" in told.means and "would reserve 6 GiB for its steps, 5 GiB with" in told.means
    assert doctor._reserves("expandable_segments:True", 4 << 30, default, expandable).state == "ok"
    assert doctor._reserves("", 4 << 30, default, default).state == "ok"
    peak, default, expandable = doctor._reserved_by_a_step()
    assert peak < expandable < default


def test_without_a_compiler_it_says_what_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.native.shutil.which", lambda name: None)
    compiler = found()["C++ compiler"]
    assert compiler.state == "problem" and compiler.found.startswith("no C++ compiler")
    assert "no step can be limited" in compiler.means and "CXX" in compiler.fix


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (dict(CXX="no-such-compiler"), "CXX names no-such-compiler, which is not there"),
        (dict(CXX="false"), "ended with 1 and says nothing"),
    ],
)
def test_a_compiler_that_is_named_and_does_not_work_is_said(named: dict[str, str], says: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "lowtide", "doctor", "--json"],
        env=os.environ | named,
        capture_output=True,
    )
    assert run.returncode == 1
    (compiler,) = [row for row in json.loads(run.stdout)["findings"] if row["subject"] == "C++ compiler"]
    assert compiler["state"] == "problem" and says in compiler["found"] and "CXX" in compiler["fix"]


def test_a_cache_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("LOWTIDE_CACHE", str(file))
    cache = found()["cache"]
    assert str(file) in cache.found and "LOWTIDE_CACHE" in cache.fix


def test_where_nothing_can_be_compiled_into_it_is_the_cache_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("LOWTIDE_CACHE", str(file))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(file))
    here = found()
    assert "C++ compiler" not in here
    assert str(file) in here["cache"].found and "LOWTIDE_CACHE" in here["cache"].fix
    assert "no step can be limited" in here["cache"].means


def test_an_old_torch_is_a_problem_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "PROBLEM  PyTorch: 2.9.1" in result.output
    assert "pip install 'torch>=2.11'" in result.output
    assert "compiler" not in result.output


@pytest.mark.parametrize(("given", "state"), [(None, "note"), ("8", "note"), ("1", "ok")])
def test_cards_whose_collectives_may_wait_for_products_are_told(
    given: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr("lowtide.accelerator.all_devices", lambda: cards)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if given:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    (queues,) = doctor._queues()
    assert queues.state == state and ("MAX_CONNECTIONS=1" in queues.fix) == (state == "note")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
    assert not doctor._queues()


def test_as_json() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    subjects = [row["subject"] for row in json.loads(result.output)["findings"]]
    assert subjects[:2] == ["lowtide", "PyTorch"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_written_for_a_shell(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # the shell is named
    result = CliRunner().invoke(app, ["--show-completion", shell], prog_name="lowtide")
    assert result.exit_code == 0
    assert "lowtide" in result.output and "_LOWTIDE_COMPLETE" in result.output


def test_completion_knows_commands() -> None:
    environment = {"_LOWTIDE_COMPLETE": "complete_bash", "COMP_WORDS": "lowtide doc", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], prog_name="lowtide", env=environment)
    assert result.output.split() == ["doctor"]
