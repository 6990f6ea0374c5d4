"""The command line: what it prints, what it refuses, and how."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

from lowtide import cli
from lowtide.plan.data import Plan

SMALL = ["--model", "gpt-nano", "--batch", "8", "--seq", "128"]


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "lowtide", *arguments]
    environment = dict(os.environ)  # readline, which pytest loads, sets COLUMNS behind Python's back
    return subprocess.run(
        line, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=environment
    )


def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """The command within this process, where torch is loaded already: exit code, output, errors."""
    monkeypatch.setattr(sys, "argv", ["lowtide", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, errors = capsys.readouterr()
    return int(exit_.value.code or 0), out, errors


def words(text: str) -> str:
    return " ".join(text.split())


def on_terminal(columns: int, *arguments: str) -> str:
    """What the command shows on a terminal that wide, without what moves the cursor and colours. It runs in a
    copy of this process, where torch is loaded already.
    """
    child, terminal = pty.fork()
    if not child:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        for name in ("COLUMNS", "PYTEST_CURRENT_TEST"):
            os.environ.pop(name, None)
        os.environ["TERM"] = "xterm"
        torch.set_num_threads(1)  # the others have not come along
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.argv = ["lowtide", *arguments]
        code = 1
        try:
            cli.main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(code)
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:  # what Linux says when the other end was closed
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, shown
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


def test_a_run_fits_a_narrow_terminal_and_leaves_lines_whole_in_a_log(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = ["train", *SMALL, "--steps", "2", "--data", str(text)]
    monkeypatch.delenv("COLUMNS", raising=False)
    folder = tmp_path / ("a-long-name-" * 8)
    code, out, errors = main(monkeypatch, capsys, *training, "--checkpoint-dir", str(folder))
    log = out + errors
    assert code == 0
    assert not [letter for letter in log if letter != "\n" and not letter.isprintable()]
    assert f"checkpoints in {folder}" in log.splitlines()
    assert [line for line in log.splitlines() if line.startswith("2 steps in ") and line.endswith(" step")]
    shown = on_terminal(60, *training, "--report", str(tmp_path / "report.html"))
    lines = re.split(r"[\r\n]+", shown)
    assert max(map(len, lines)) <= 60, "\n".join(line for line in lines if len(line) > 60)
    assert "held in every step" in words(shown) and "bitwise equal" in shown and "2/2" in shown


def test_version_and_help_come_without_torch() -> None:
    code = (
        "import sys\nsys.argv = ['lowtide', '{}']\nimport lowtide.cli\n"
        "try: lowtide.cli.main()\nexcept SystemExit: print('torch' in sys.modules)"
    )
    for option, expected in (("--version", "lowtide 0."), ("--help", "train")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(option)], capture_output=True, text=True, check=True
        )
        assert expected in done.stdout
        assert done.stdout.splitlines()[-1] == "False" and "..." not in done.stdout.split("Commands:")[-1]


def test_a_compiled_step_is_planned_without_running_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = [
        "--model",
        "gpt-nano",
        "--batch",
        "4",
        "--seq",
        "32",
        "--compile",
        "--compile-backend",
        "aot_eager",
    ]
    file = tmp_path / "plan.json"
    code, out, _ = main(monkeypatch, capsys, "plan", *step, "--budget", "85%", "--json", str(file))
    assert code == 0
    for expected in ("peak", "time", "bound", "compiled by aot_eager"):
        assert expected in out
    plan = Plan.from_json(file.read_text())
    assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert plan.replayed
    code, out, _ = main(monkeypatch, capsys, "plan", *step)
    assert code == 0
    assert "the smallest that works: the default of 60%" in words(out)
    code, _, errors = main(monkeypatch, capsys, "plan", *step, "--device", "h100", "--dtype", "bf16")
    assert code == 2
    assert "leave one out" in errors


def test_a_small_run_shows_the_whole_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    shorter = ["--steps", "4", "--budget", "70%", "--json", "r.json", "--report", "memory.png"]
    code, out, errors = main(monkeypatch, capsys, "train", *SMALL, *shorter, "--data", str(text))
    assert code == 0, errors
    output = words(out)
    for expected in (
        "tokens/s",
        "peak",
        "validation",
        "plain step",
        "planned step",
        "held",
        "optimality gap",
        "bitwise equal",
        "yes",
    ):
        assert expected in output
    assert "█" in out and "┄ budget" in out
    results = json.loads((tmp_path / "r.json").read_text())
    assert len(results["losses"]) == 4
    assert results["comparison"]["within_budget"] is True
    assert results["comparison"]["bitwise_equal"] is True
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_quiet_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    quietly = ["--steps", "1", "--policy", "keep_all", "--no-compare", "--quiet", "--data", str(text)]
    code, out, _ = main(monkeypatch, capsys, "train", *SMALL, *quietly)
    assert (code, out) == (0, "")


def test_a_plan_is_printed_and_saved_without_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    code, out, errors = main(monkeypatch, capsys, "plan", *SMALL, "--budget", "70%", "--json", str(file))
    assert code == 0, errors
    assert "blocks" in out
    plan = Plan.from_json(file.read_text())
    assert plan.budget_bytes is not None
    assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--model", "gpt-namo"], "did you mean 'gpt-nano'"),
        (["train", "--budget", "lots"], "'lots' is not understood"),
        (
            ["train", "--policy", "magic", "--steps", "1", *SMALL],
            "--policy magic: choose auto, optimal, keep_all, ",
        ),
        (["plan", "--policy", "magic", *SMALL], "--policy magic: choose auto, optimal, keep_all, "),
        (["train", "--checkpoint-dir", __file__], "that is a file, and a folder is needed"),
        (["train", "--steps", "0"], "--steps 0: at least 1 is needed"),
        (["train", "--data", "missing.txt"], "there is no file or folder 'missing.txt'"),
        (["train", "--data", "."], "holds no text file"),
        (["train", "--resume"], "there is nothing to resume, no folder in 'runs' holds a checkpoint"),
        (["train", "--resume", "runs/typo"], "--resume runs/typo: there is no such folder: give the folder"),
        (["train", "--resume", "."], "--resume .: no checkpoint is there: give the folder of a run"),
        (["train", "runs/first"], "write --resume runs/first to continue it, --checkpoint-dir runs/first"),
        (["train", "--resume", "a", "--checkpoint-dir", "b"], "leave out --checkpoint-dir"),
        (["train", "--json", "no/such/folder/r.json"], "cannot write a file there"),
        (["train", "--model", "gpt3-175b"], "choose a smaller model"),
        (["train", "--budget", "1MiB", *SMALL], "the budget of 1 MiB is too small: parameters "),
        (["plan", "--budget", "1MiB", *SMALL], "the smallest that works"),
        (["plan", "--seq", "5000"], "has 1024 positions"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = main(monkeypatch, capsys, *arguments)
    assert code == 2
    assert errors.splitlines()[-1].startswith("lowtide: ") or "lowtide: " in errors
    assert message in words(errors)


def test_the_default_budget_is_never_below_the_smallest_that_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    """With one short sequence nearly all of the step are parameters and gradients, so 60 % of it is not
    enough.
    """
    little = ["--model", "gpt-nano", "--batch", "1", "--seq", "16"]
    monkeypatch.setenv("COLUMNS", "60")
    code, shown, _ = main(monkeypatch, capsys, "plan", *little)
    assert max(map(len, shown.splitlines())) <= 60 and "blocks.0" in shown
    assert code == 0 and "the smallest that works: the default of 60% of the plain step's peak is" in words(
        shown
    )
    training = [*little, "--steps", "1", "--no-compare", "--data", str(text)]
    code, shown, _ = main(monkeypatch, capsys, "train", *training)
    assert code == 0 and "the smallest that works: the default of 60%" in words(shown)
    code, _, errors = main(monkeypatch, capsys, "train", *training, "--budget", "60%")
    assert code == 2 and "is too small" in errors, "what was asked for is not changed"


def test_a_bare_resume_goes_on_with_the_newest_run_as_it_was_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("b-older", "1"), ("a-newer", "2"), ("c-empty", "")):
        Path("runs", name).mkdir(parents=True)
        if seed:
            own = [
                "--model",
                "gpt-nano",
                "--batch",
                "2",
                "--seq",
                "32",
                "--policy",
                "full",
                "--seed",
                seed,
                "--data",
                str(text),
            ]
            folder = ["--checkpoint-dir", f"runs/{name}", "--json", f"runs/{name}/results.json"]
            code, _, _ = main(monkeypatch, capsys, "train", *own, *folder, "--steps", "2", "--no-compare")
            assert code == 0
    code, _, errors = main(monkeypatch, capsys, "train", "--resume", "--no-compare")
    assert code == 2 and "the run in runs/a-newer is at step 2 already, of 2: pass --steps 4" in words(errors)
    code, shown, errors = main(monkeypatch, capsys, "train", "--resume", "--steps", "3", "--no-compare")
    assert code == 0, errors
    assert (
        "going on with the run in runs/a-newer after step 2 of 3 (2 so far): the learning rate follows the "
        "new length" in words(shown)
    )
    told = json.loads(Path("runs/a-newer/results-from-2.json").read_text())
    assert (told["first_step"], told["last_step"]) == (2, 3)
    kept = {
        name: told["options"][name]
        for name in ("model", "batch", "seq", "policy", "budget", "seed", "warmup")
    }
    assert kept == {
        "model": "gpt-nano",
        "batch": 2,
        "seq": 32,
        "policy": "full",
        "budget": None,
        "seed": 2,
        "warmup": 2,
    }
    other = ["--steps", "9", "--lr", "0.5", "--batch", "4", "--model", "gpt-tiny"]
    code, _, errors = main(monkeypatch, capsys, "train", "--resume", "--no-compare", *other)
    assert code == 2
    for mismatch in ("it has --batch 2, not 4", "it has --lr 0.001, not 0.5", "a model of another shape"):
        assert mismatch in words(errors), "all are named at once"
    named = ["--resume", "runs/b-older", "--checkpoint-dir", "runs/../runs/b-older", "--steps", "3"]
    for run_named in (named[:2], named[:4]):
        code, _, errors = main(monkeypatch, capsys, "train", *run_named, "--no-compare")
        assert code == 2 and "the run in runs/" in words(errors) and "b-older is at step 2" in words(errors)
    code, shown, errors = main(monkeypatch, capsys, "train", *named[:2], *named[4:], "--no-compare")
    assert code == 0 and "going on with the run in runs/b-older after step 2 of 3" in words(shown), errors


@pytest.mark.parametrize("budget", ["min", "auto"])
def test_a_budget_may_be_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, budget: str
) -> None:
    file = tmp_path / "plan.json"
    code, _, _ = main(monkeypatch, capsys, "plan", *SMALL, "--budget", budget, "--json", str(file))
    plan = Plan.from_json(file.read_text())
    assert code == 0 and plan.budget_bytes is not None
    assert (plan.predicted_peak_bytes < plan.plain_peak_bytes) == (budget == "min")
    assert plan.predicted_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize(
    "arguments",
    [["train", "--stepz", "3"], ["train", "--steps", "many"], ["train", "--dtype", "fp16"], ["fly"]],
)
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
