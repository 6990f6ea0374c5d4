"""`lowtide trace`, `plan` and `report` of a user's own script."""

from __future__ import annotations

import json
import logging
import re
import runpy
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import lowtide
from lowtide import cli
from lowtide.plan.data import Plan

SCRIPT = """
import sys

import torch
from {helper} import WIDTH
from torch import nn

assert __name__ != "__main__"
assert sys.argv == [{argv!r}]
SEEN = open("data.txt").read()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in range(5)]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 10)
        self.unused = nn.Linear(WIDTH, 100)

    def forward(self, x, y=None, asks=False, fails=False, labels=False):
        for block in self.blocks:
            x = x + block(x)
        if asks and x.sum().item() > 1e9:
            return -x
        if labels and y.max().item() > 9:
            return -x
        if fails:
            x = x @ torch.ones(3, 3)
        x = self.head(x)
        return x if y is None else nn.functional.cross_entropy(x, y)


def make_step():
    torch.manual_seed(0)
    return Net(), (torch.randn(1024, WIDTH), torch.randint(10, (1024,)))


def counted():
    model, args = make_step()
    return model, args, torch.optim.AdamW(model.parameters())


def by_name():
    model, (x, y) = make_step()
    return model, {{"x": x, "y": y}}


def asking():
    return *make_step(), {{"asks": True}}


def failing():
    return *make_step(), {{"fails": True}}


def step():
    model, (x, y) = make_step()
    optimizer = torch.optim.AdamW(model.parameters())

    def one():
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return one


class Trainer:
    def __init__(self):
        self.model, (self.x, self.y) = make_step()

    def step(self):
        return nn.functional.cross_entropy(self.model(self.x), self.y)


def of_a_trainer():
    return Trainer().step


def two_models():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    return lambda: second(first(torch.ones(2, 4))).sum().backward()


def on_meta():
    with torch.device("meta"):
        return counted()


def asking_on_meta():
    with torch.device("meta"):
        return asking()


def labels_on_meta():
    with torch.device("meta"):
        return *make_step(), {{"labels": True}}


def labels_here():
    with torch.device("meta"):
        model, (x, _) = make_step()
    return model, (x, torch.arange(1024, device="cpu") % 10), {{"labels": True}}


def alone():
    return Net()


def number():
    return 3


def needs(width, *, depth):
    return width, depth


def raises():
    return 1 / 0


def ends():
    sys.exit(3)


def of_another_model():
    return *make_step(), torch.optim.SGD(nn.Linear(2, 2).parameters())


value = 3
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, beside a module that it imports; data lies in the current folder, which is another one."""
    monkeypatch.chdir(tmp_path)
    folder, helper = tmp_path / "code", f"helper_{tmp_path.name.replace('-', '_')}"
    folder.mkdir()
    (folder / f"{helper}.py").write_text("WIDTH = 64\n")
    (tmp_path / "data.txt").write_text("here")
    text = SCRIPT.format(helper=helper, argv="code/my_train.py")
    (folder / "my_train.py").write_text(text)
    return Path("code/my_train.py")


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lowtide", *arguments])
    path = list(sys.path)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert (sys.path, sys.argv) == (path, ["lowtide", *arguments])
    out, errors = capsys.readouterr()
    return int(exit_.value.code or 0), out, errors


def functions(script: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the script defines, for the tests."""
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script)])
    return runpy.run_path(str(script))


@pytest.mark.parametrize(
    ("function", "budget"),
    [
        ("make_step", "60%"),
        ("counted", "min"),
        ("counted", "60%"),
        ("by_name", "min"),
        ("asking", "min"),
        ("step", "60%"),
        ("of_a_trainer", "min"),
    ],
)
def test_a_limited_run_takes_what_the_plan_says(
    script: Path,
    function: str,
    budget: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["plan", f"{script}:{function}", "--budget", budget, "--json", "plan.json"]
    code, out, errors = run(monkeypatch, capsys, *line)
    assert code == 0, errors
    plan = Plan.from_json(Path("plan.json").read_text())
    assert "saved by autograd" in out and "head" in out
    assert ("AdamW is counted" in out) is (function in ("counted", "step"))
    assert ("the step ran here" in out) is (function in ("asking", "step", "of_a_trainer"))

    model, (x, y), optimizer = functions(script, monkeypatch)["counted"]()
    counts = optimizer if "AdamW is counted" in out else None
    handle = lowtide.limit_memory(model, budget, optimizer=counts)
    for _ in range(2):
        outside = function in ("step", "of_a_trainer")
        loss = torch.nn.functional.cross_entropy(model(x), y) if outside else model(x, y)
        loss.backward()
        measured = handle.measured_peak_bytes
        if counts is not None:
            optimizer.step()
        optimizer.zero_grad()
    assert measured is not None
    assert plan.predicted_peak_bytes == pytest.approx(measured, rel=0.01)
    assert plan.budget_bytes == pytest.approx(handle.budget_bytes, rel=0.001)
    assert plan.predicted_peak_bytes < plan.plain_peak_bytes
    handle.remove()


def test_a_model_on_the_meta_device_has_the_same_plan(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []
    for function in ("counted", "on_meta"):
        line = ["plan", f"{script}:{function}", "--budget", "min", "--json", "plan.json", "--quiet"]
        assert run(monkeypatch, capsys, *line) == (0, "", "")
        plans.append(Plan.from_json(Path("plan.json").read_text()))
    assert plans[0].graph == plans[1].graph
    assert plans[0].predicted_peak_bytes == plans[1].predicted_peak_bytes
    assert run(monkeypatch, capsys, "plan", f"{script}:labels_here")[0] == 0
    code, out, _ = run(monkeypatch, capsys, "plan", f"{script}:on_meta", "--device", "h100")
    assert code == 0
    assert "seconds are the h100" in out


def test_the_default_budget_is_raised_where_it_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights.py").write_text(
        dedent("""
        import torch

        def made():
            model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 1))
            return model, torch.ones(4, 512)

        def step():
            model, x = made()
            return lambda: model(x).sum()
        """)
    )
    for function in ("made", "step"):
        code, out, _ = run(monkeypatch, capsys, "plan", f"{tmp_path / 'weights.py'}:{function}")
        assert code == 0
        assert "the smallest that works: the default of 60%" in " ".join(out.split())
    code, _, errors = run(monkeypatch, capsys, "plan", f"{tmp_path / 'weights.py'}:made", "--budget", "1KiB")
    assert code == 2 and "the budget of 1 KiB is too small" in errors


def test_a_trace_and_a_page_of_a_script(
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "lowtide"):
        code, out, errors = run(monkeypatch, capsys, "trace", f"{script}:counted", "--json", "graph.json")
    assert code == 0, errors
    (told,) = [line for line in caplog.messages if " in " in line and " s: " in line]
    assert re.fullmatch(r"traced in [0-9.]+ s: [0-9,]+ operations, [0-9.]+ MiB at the peak", told)
    graph = lowtide.StepGraph.from_json(json.loads(Path("graph.json").read_text()))
    forward = sum(operation.phase == "forward" for operation in graph.operations)
    assert f"{forward} operations in forward" in out and "saved by autograd" in out
    plan = lowtide.plan(graph, "min")
    code, _, errors = run(
        monkeypatch, capsys, "plan", f"{script}:counted", "--budget", "min", "--json", "plan.json"
    )
    assert code == 0, errors
    planned = Plan.from_json(Path("plan.json").read_text())
    assert planned.plain_peak_bytes == plan.plain_peak_bytes
    assert planned.predicted_peak_bytes == plan.predicted_peak_bytes
    code, out, errors = run(
        monkeypatch, capsys, "report", f"{script}:counted", "--budget", "min", "-o", "a.html"
    )
    assert code == 0, errors
    assert out == f"report in a.html ({script}:counted)\n"
    assert f"<title>{script}:counted - lowtide report</title>" in Path("a.html").read_text()


def test_a_trace_of_a_preset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = ["trace", "--model", "gpt-nano", "--batch", "2", "--seq", "32", "--json", str(tmp_path / "g.json")]
    code, out, errors = run(monkeypatch, capsys, *line)
    assert code == 0, errors
    assert "blocks.0-1.mlp.up" in out and "at the peak stand" in out


def test_a_function_of_a_module(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = f"package_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "model.py").write_text("import torch\n\nmade = torch.nn.Linear(64, 64)\n")
    (tmp_path / name / "train.py").write_text(
        "import torch\n\nfrom .model import made\n\n\ndef make():\n    return made, torch.ones(8, 64)\n"
    )
    code, _, errors = run(monkeypatch, capsys, "plan", f"{name}.train:make", "--budget", "100%")
    assert code == 0, errors
    code, _, errors = run(monkeypatch, capsys, "plan", f"{name}.train:mak")
    assert code == 2
    assert f"{name}.train has no function 'mak': it has make. Did you mean make?" in errors
    code, _, errors = run(monkeypatch, capsys, "plan", f"{name}.trains:make")
    assert code == 2 and f"there is no module '{name}.trains' in this folder, or installed" in errors


def test_a_model_of_pytorch_s_own_modules_that_the_script_has_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "limits_it.py").write_text(
        dedent("""
        import lowtide
        from torch import nn, ones

        def made():
            model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
            lowtide.limit_memory(model, "1KiB")
            return model, ones(512, 64)
        """)
    )
    line = ["plan", f"{tmp_path / 'limits_it.py'}:made", "--budget", "min"]
    code, out, errors = run(monkeypatch, capsys, *line)
    assert code == 0 and "limited" not in errors, errors
    assert "of activations" in out and ".py:" not in out, "no line of a user's calls its operations"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("my_trian.py:make_step", "code/my_trian.py: there is no such file; did you mean code/my_train.py?"),
        ("my_train.py", "name a function of it, as in code/my_train.py:make_step; it has make_step, counted"),
        ("my_train.py:mke_step", "no function 'mke_step': it has make_step, counted"),
        ("my_train.py:value", "code/my_train.py:value: that is no function, but of type int"),
        ("my_train.py:needs", "code/my_train.py:needs needs arguments (width, depth)"),
        ("my_train.py:number", "code/my_train.py:number returned int: return (model, args), (model, args"),
        ("my_train.py:alone", "returned a model alone: return its arguments, too"),
        ("my_train.py:two_models", "trains several models (Linear, Linear), and a limit is on one"),
        ("my_train.py:of_another_model", "holds none of this model's parameters"),
        ("my_train.py:ends", "code/my_train.py:ends called sys.exit(3)"),
    ],
)
def test_what_is_no_step_is_refused_in_a_line(
    script: Path,
    target: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, errors = run(monkeypatch, capsys, "plan", f"{script.parent}/{target}")
    assert (code, out) == (2, "")
    assert said in errors and errors.startswith("lowtide: ") and errors.count("\n") == 1


def test_options_of_a_preset_do_not_go_with_a_script(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "trace", "report"):
        code, _, errors = run(
            monkeypatch, capsys, command, f"{script}:make_step", "--batch", "4", "--seq", "8"
        )
        assert code == 2 and "--batch, --seq shape the step of a preset" in errors
    code, _, errors = run(monkeypatch, capsys, "plan", f"{script}:make_step", "--device", "cuda")
    assert code == 2 and "the script says where its model is" in errors
    code, _, errors = run(monkeypatch, capsys, "plan", f"{script}:step", "--device", "h100")
    assert code == 2 and "return (model, args) of a model that is not compiled" in errors


@pytest.mark.parametrize(
    ("function", "error", "line"),
    [
        ("raises", "ZeroDivisionError: division by zero", "return 1 / 0"),
        ("failing", "mat1 and mat2 shapes cannot be multiplied", "x = x @ torch.ones(3, 3)"),
        ("asking_on_meta", "only integers and booleans", "x.sum().item()"),
        ("labels_on_meta", "only integers and booleans", "y.max().item()"),
    ],
)
def test_an_error_of_the_script_is_shown_from_its_own_code_on(
    script: Path,
    function: str,
    error: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, errors = run(monkeypatch, capsys, "plan", f"{script}:{function}")
    assert (code, out) == (1, "")
    assert error in errors and line in errors and "my_train.py" in errors
    assert errors.count(str(Path(lowtide.__file__).parent)) <= 2
    assert "typer" not in errors and "importlib" not in errors


def test_a_script_that_does_not_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, said in (
        ("import not_there\n\n\ndef make(): ...\n", "No module named 'not_there'"),
        ("def make(:\n", "SyntaxError"),
    ):
        (tmp_path / "broken.py").write_text(text)
        code, _, errors = run(monkeypatch, capsys, "plan", f"{tmp_path / 'broken.py'}:make")
        assert code == 1 and said in errors and "broken.py" in errors
        assert errors.count(str(Path(lowtide.__file__).parent)) == 0


def test_a_script_may_have_the_name_of_a_module_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inspect.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Linear(8, 8), torch.ones(4, 8)\n"
    )
    before = sys.modules["inspect"]
    assert run(monkeypatch, capsys, "plan", f"{tmp_path / 'inspect.py'}:make", "--budget", "100%")[0] == 0
    assert sys.modules["inspect"] is before
