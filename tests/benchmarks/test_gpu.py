"""`make gpu`: every row is taken down when it is known, what fails is a row, and a later run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import child, runner
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.rows import Unmeasured, Where, bytes_alone
from benchmarks.gpu.table import rendered

from lowtide.errors import BudgetError
from lowtide.run.messages import LowtideWarning

ABOUT = {
    "date": "2026-01-31",
    "torch": "2.13.0",
    "python": "3.12.1",
    "lowtide": "0",
    "commit": "abc",
    "small": True,
    "processor": "a processor",
    "cores": 2,
}

SCRIPT = """
import faulthandler, json, os, signal, sys, time
faulthandler.enable()
def tell(**what):
    print(json.dumps(what), flush=True)
if {early}:
    sys.exit("no room to begin in")
tell(ready=True)
for row in sys.argv[1:]:
    if row == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if row == "stand still":
        time.sleep(60)
    if row == "fail":
        tell(row=row, found=dict(state="failed", error="it failed"))
        break
    tell(row=row, found=dict(state="done", by=os.getpid()))
"""
"""Stands for `child`: the same lines, in a process that starts at once."""


def never(where: Where) -> Any:
    raise AssertionError("measured in this process")


@pytest.fixture
def results(tmp_path: Path) -> runner.Results:
    return runner.Results(tmp_path, "this run", ABOUT)


def measure(results: runner.Results, *rows: str, early: bool = False, seconds: float = 60.0) -> bool:
    """Rows of one part with the script in place of `child`; what stands still has a second."""

    def command(part: Part, todo: list[str]) -> list[str]:
        return [sys.executable, "-S", "-c", SCRIPT.format(early=early), *todo]

    part = Part("part", rows, never, limit_seconds=1.0)
    return runner.run([part], results, time.monotonic() + seconds, True, command)


def states(results: runner.Results) -> dict[str, str]:
    kept = json.loads((results.folder / "gpu.json").read_text())["rows"]
    return {row["row"]: row["state"] for row in kept}


def test_what_fails_is_a_row_and_the_rest_goes_on(results: runner.Results) -> None:
    assert measure(results, "first", "crash", "second", "fail", "stand still", "last")
    assert states(results) == {
        "first": "done",
        "crash": "failed",
        "second": "done",
        "fail": "failed",
        "stand still": "failed",
        "last": "done",
    }
    rows = {row: found for (_, row), found in results.rows.items()}
    assert "SIGSEGV" in rows["crash"]["error"] and 'File "<string>", line' in rows["crash"]["error"]
    assert "longer than 1 s" in rows["stand still"]["error"]
    assert len({rows[name]["by"] for name in ("first", "second", "last")}) == 3  # a process anew after each


def test_where_nothing_can_begin_each_row_has_failed_with_why(results: runner.Results) -> None:
    assert measure(results, "first", "second", early=True)
    assert [row["error"] for row in results.rows.values()] == [
        "the process ended with exit code 1: no room to begin in"
    ] * 2


def test_a_later_run_of_the_same_code_measures_what_is_not_known(results: runner.Results) -> None:
    measure(results, "first", "fail")
    again = runner.Results(results.folder, "this run", ABOUT)
    again.resume(retry=False)
    assert measure(again, "first", "fail", "second")
    assert again.rows["part", "first"] == results.rows["part", "first"]
    assert again.rows["part", "fail"] == results.rows["part", "fail"]
    assert again.rows["part", "second"]["state"] == "done"
    again.resume(retry=True)
    assert ("part", "fail") not in again.rows and ("part", "first") in again.rows
    other = runner.Results(results.folder, "other code", ABOUT)
    other.resume(retry=False)
    assert not other.rows
    assert len(json.loads((results.folder / "gpu-this run.json").read_text())["rows"]) == 3


def test_at_the_deadline_all_ends_and_what_was_under_way_has_no_row(
    results: runner.Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not measure(results, "first", seconds=runner.ENOUGH_SECONDS - 1)
    assert not results.rows
    monkeypatch.setattr(runner, "ENOUGH_SECONDS", 0)
    assert not measure(results, "first", "stand still", "last", seconds=0.7)
    assert states(results) == {"first": "done"}


SLEEPER = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu.child import end_with_parent
end_with_parent()
Path("pid.part").write_text(str(os.getpid()))
os.rename("pid.part", "pid")
time.sleep(60)
"""
KILLED = f"""
import os, sys, time
from pathlib import Path
from benchmarks.gpu import runner
from benchmarks.gpu.parts import Part
runner.ROOT = Path.cwd()
results = runner.Results(Path.cwd(), "run", {ABOUT})
part = Part("part", ("row",), lambda where: None)
runner.run([part], results, time.monotonic() + 60, True, lambda *_: [sys.executable, "sleeper.py"])
"""


def test_a_run_that_is_killed_leaves_nothing_on_the_card(tmp_path: Path) -> None:
    """A part has a session of its own: it went on beside the run after it."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    told, environment = tmp_path / "pid", {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen([sys.executable, "-c", KILLED], cwd=tmp_path, env=environment)
    try:
        while not told.exists():
            assert run.poll() is None
            time.sleep(0.05)
    finally:
        run.kill()
        run.wait()
    began = time.monotonic()
    while _runs(int(told.read_text())):
        assert time.monotonic() < began + 20
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process is there, and not only its number, which nobody has asked for."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_row_says_why_it_is_none() -> None:
    def measure(name: str) -> dict[str, Any]:
        if name == "warned":
            for _ in range(2):
                warnings.warn("over budget", LowtideWarning, stacklevel=2)
            return {"bytes": 1}
        raise {"card": Unmeasured("needs a card"), "small": BudgetError("too small")}.get(name, OSError("no"))

    assert child.outcome(measure, "warned") == {"state": "done", "bytes": 1, "warnings": ["over budget"]}
    assert child.outcome(measure, "card") == {"state": "skipped", "error": "needs a card"}
    assert child.outcome(measure, "small") == {"state": "refused", "error": "BudgetError: too small"}
    assert child.outcome(measure, "other") == {"state": "failed", "error": "OSError: no"}


@pytest.fixture
def attentions() -> Iterator[None]:
    """A part chooses among PyTorch's attentions for its whole process."""
    backends = torch.backends.cuda
    names = ("mem_efficient", "math", "cudnn")
    before = {name: getattr(backends, f"{name}_sdp_enabled")() for name in names}
    yield
    for name, on in before.items():
        getattr(backends, f"enable_{name}_sdp")(on)


@pytest.mark.usefixtures("attentions")
def test_a_budget_is_measured_on_a_cpu_and_shown(results: runner.Results) -> None:
    (part,) = (part for part in PARTS if part.name == "Llama, eager")
    row = child.outcome(part.open(Where("cpu", small=True)), "60 %")
    assert row["state"] == "done" and row["same_gradients"] and row["plain_repeats"]
    predicted = row["predicted_peak_bytes"]
    assert 0.99 * predicted <= row["counted_bytes"] <= predicted <= row["budget_bytes"]
    assert row["recomputed"]
    results.add(part.name, "60 %", row)
    results.add("tests", "tests/gpu", {"state": "skipped", "error": "needs a CUDA device"})
    text = (results.folder / "gpu.md").read_text()
    assert f"| 60 % | yes | {row['budget_bytes'] / 2**20:.1f} |" in text
    assert f"1 of {sum(len(part.rows) for part in PARTS)} rows measured" in text
    assert "- tests, tests/gpu: skipped: needs a CUDA device" in text
    assert "- Llama, eager, min: not reached yet" in text


def test_without_a_card_a_row_has_bytes_and_no_times(
    results: runner.Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part runs through the plug-in of PyTorch's CUDA build without a card, in that build's Python."""
    asked = gpu.parsed(["--no-card", "built", "--only", "Llama, eager", "--out", str(results.folder)])
    python, script, folder, run, module, *rest = gpu.without_card(asked)
    assert (python, Path(script).name, folder) == (sys.executable, "environment.py", "built")
    assert (run, module) == ("--run", "benchmarks.gpu") and gpu.parsed(rest).only == "Llama, eager"
    monkeypatch.setattr(runner, "NO_CARD", True)
    (part,) = (part for part in PARTS if part.name == "Llama, eager")
    command = runner.command_of(small=False)(part, ["min"])
    assert command[1:] == ["-m", "no_card", "benchmarks.gpu.child", "Llama, eager", "full", "min"]
    row = {
        **dict.fromkeys(("seconds", "extra", "tokens_a_second", "settling_seconds"), 1.0),
        **{"state": "done", "same_gradients": True, "budget_bytes": 3 << 20, "requested_bytes": 2 << 20},
        "contenders": [{"peak_bytes": 5, "seconds": 1.0}],
    }
    found = bytes_alone(row)
    assert found == {
        **{"state": "done", "budget_bytes": 3 << 20, "requested_bytes": 2 << 20},
        "contenders": [{"peak_bytes": 5}],
    }
    results.add(part.name, "min", found)
    text = (results.folder / "gpu.md").read_text()
    assert "| Llama, eager | budget | requested |" in text and "| min | 3.0 | 2.0 |" in text
    for name in ("tests", "deterministic, eager"):
        (part,) = (part for part in PARTS if part.name == name)
        measure = lambda row, part=part: part.open(Where("cuda", False, card=False))(row)  # noqa: E731
        assert child.outcome(measure, part.rows[0])["state"] == "skipped"


def test_gradients_that_differ_stand_out() -> None:
    differing = {
        "part": "deterministic, eager",
        "row": "GPT min",
        "state": "done",
        "same_gradients": False,
        "largest_difference": 0.25,
        "plain_repeats": True,
        "replays": 3,
        "kept": {"aten.op": "draws"},
    }
    assert "| GPT min | **no**, 2.5e-01 | yes | 3 | `aten.op` |" in rendered(ABOUT, [differing])


def test_it_needs_no_set_up(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = ["make", "--dry-run", "gpu", "VENV=none", f"OUT={tmp_path}", "PYTHON=some-python", "ARGS="]
    # beneath `make test` the inner one would name its folder, too
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    said = subprocess.run(command, cwd=root, env=alone, capture_output=True, text=True, check=True).stdout
    assert said.split() == f'PYTHONPATH=src some-python -m benchmarks.gpu --out "{tmp_path}"'.split()
