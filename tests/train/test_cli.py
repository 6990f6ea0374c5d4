"""The command line: what it prints, what it refuses, and how."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import cli
from lowtide.plan.plan import Plan

SMALL = ["--model", "gpt-nano", "--batch", "8", "--seq", "128"]


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "lowtide", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, cwd=folder)


def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The command within this process, where torch is loaded already: exit code, output, errors."""
    monkeypatch.setattr(sys, "argv", ["lowtide", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, errors = capsys.readouterr()
    return int(exit_.value.code or 0), out, errors


def words(text: str) -> str:
    return " ".join(text.split())


def test_version_and_help_come_without_torch() -> None:
    code = (
        "import sys\nsys.argv = ['lowtide', '{}']\nimport lowtide.cli\n"
        "try: lowtide.cli.main()\nexcept SystemExit: print('torch' in sys.modules)"
    )
    for option, expected in (("--version", "lowtide 0."), ("--help", "train")):
        done = subprocess.run([sys.executable, "-c", code.format(option)], capture_output=True, text=True, check=True)
        assert expected in done.stdout
        assert done.stdout.splitlines()[-1] == "False"


def test_a_small_run_shows_the_whole_story(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("train", *SMALL, "--steps", "4", "--budget", "70%", "--json", "r.json", "--plot", "memory.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    output = words(done.stdout)
    for expected in (
        "tokens/s",
        "live peak",
        "validation loss",
        "plain step",
        "planned step",
        "held",
        "optimality gap",
        "bitwise equal",
        "yes",
    ):
        assert expected in output
    assert any(0x2800 < ord(character) <= 0x28FF for character in done.stdout)
    results = json.loads((tmp_path / "r.json").read_text())
    assert len(results["losses"]) == 4
    assert results["comparison"]["within_budget"] is True
    assert results["comparison"]["bitwise_equal"] is True
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_quiet_says_nothing(tmp_path: Path) -> None:
    done = run("train", *SMALL, "--steps", "1", "--policy", "keep_all", "--no-compare", "--quiet", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_plan_is_printed_and_saved_without_training(tmp_path: Path) -> None:
    done = run("plan", *SMALL, "--budget", "70%", "--json", "plan.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "blocks" in done.stdout
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.budget_bytes is not None
    assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--model", "gpt-namo"], "did you mean 'gpt-nano'"),
        (["train", "--budget", "lots"], "'lots' is not understood"),
        (["train", "--policy", "magic", "--steps", "1", *SMALL], "--policy magic: choose optimal, keep_all, "),
        (["plan", "--policy", "magic", *SMALL], "--policy magic: choose optimal, keep_all, "),
        (["train", "--checkpoint-dir", __file__], "that is a file, and a folder is needed"),
        (["train", "--steps", "0"], "--steps 0: at least 1 is needed"),
        (["train", "--data", "missing.txt"], "there is no file or folder 'missing.txt'"),
        (["train", "--data", "."], "holds no text file"),
        (["train", "--resume"], "it needs --checkpoint-dir"),
        (["train", "--json", "no/such/folder/r.json"], "cannot write a file there"),
        (["train", "--model", "gpt3-175b"], "choose a smaller model"),
        (["train", "--budget", "1MiB", *SMALL], "the smallest that can be met is "),
        (["plan", "--budget", "1MiB", *SMALL], "smallest"),
        (["plan", "--budget", "1MiB", *SMALL], "Give --budget "),
        (["plan", "--seq", "5000"], "has 1024 positions"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = main(monkeypatch, capsys, *arguments)
    assert code == 2
    assert errors.splitlines()[-1].startswith("lowtide: ") or "lowtide: " in errors
    assert message in words(errors)


@pytest.mark.parametrize("arguments", [["train", "--stepz", "3"], ["train", "--steps", "many"], ["train", "--dtype", "fp16"], ["fly"]])
def test_an_unknown_option_or_value_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, _, errors = main(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "Usage: " in errors


def test_a_mistake_shows_no_traceback_in_a_real_process(tmp_path: Path) -> None:
    done = run("train", "--data", "missing.txt", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lowtide: there is no file or folder 'missing.txt': check --data\n"
