"""Every code block of README and docs: Python runs, page by page, in order; what a page says that it prints
is printed; commands are ones that lowtide, make and pip understand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import typer
from benchmarks.__main__ import NAMES
from blocks import PAGES, ROOT, blocks_of, name_of
from given import given

from lowtide import cli
from lowtide.estimate.errors import EstimateError
from lowtide.train.options import TrainOptions

NEEDS = {
    "README.md": ("transformers", "accelerate"),
    "docs/guides/lora.md": ("transformers", "peft"),
    "docs/integrations.md": ("transformers", "accelerate", "lightning", "peft"),
}
"""Packages without which a page cannot run."""

RUN = r"lowtide (doctor|plan|trace|train|report (--|my_train)|simulate --model 1t)"
"""Commands that take a second or two."""

TWO_STEPS = ("--steps", "2", "--data", "text.txt")
PAIR = "torchrun --nproc-per-node 2 "
"""Commands that two processes of a laptop run."""

SMALLER = {
    "plan": ["--model", "gpt-nano", "--batch", "8", "--seq", "128"],
    "train": ["--model", "gpt-nano", "--batch", "2", "--seq", "32", "--steps", "2", "--data", "text.txt"],
    "report": ["--model", "gpt-nano", "--batch", "8", "--seq", "128"],
}
"""Put behind a command's own options, which they take the place of."""

PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]
COMMANDS = sorted(
    {
        line.split(" #")[0].strip()
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "sh"
        for line in block.text.splitlines()
        if line.strip()
    }
)


@pytest.mark.parametrize("page", PYTHON, ids=name_of)
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")
def test_a_page_runs_and_prints_what_it_says(page: Path) -> None:
    for package in NEEDS.get(name_of(page), ()):
        pytest.importorskip(package)
    names, said = given(name_of(page)), ""
    for block in blocks_of(page):
        if block.language == "python":
            out = StringIO()
            with redirect_stdout(out):
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
            said = out.getvalue()
        elif block.language == "text" and block.follows:
            missing = [line for line in block.text.splitlines() if line.strip() not in said]
            assert not missing, f"{name_of(page)}, line {block.line}: {missing} is not in {said!r}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    known = ("python", "sh", "text")
    strange = [(block.line, block.language) for block in blocks_of(page) if block.language not in known]
    assert not strange, f"{name_of(page)}: choose one of {known} for {strange}"


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "torchrun":
        words = ["lowtide", *words[words.index("lowtide") + 1 :]]
    if words[0] == "lowtide":
        understood(words[1:])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:3] == ["python", "-m", "benchmarks"]:
        assert set(words[3:]) <= {*NAMES, "--quick"}
    else:
        assert words[:2] == ["pip", "install"], "say in this test how such a command is checked"
        asked = re.fullmatch(r"(?:lowtide|\.)(?:\[(\w+)\])?", words[2])
        assert asked is not None
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert asked[1] is None or asked[1] in extras


def understood(words: list[str]) -> None:
    """Every option exists, with a value of its kind; nothing runs."""
    app = typer.main.get_command(cli.app)
    if words[0].startswith("--"):
        assert any(words[0] in option.opts for option in app.params)
        return
    command = app.commands[words[0]]  # type: ignore[attr-defined]
    if "--help" in words:
        return
    given = command.make_context(words[0], words[1:]).params
    if words[0] == "train":  # they go together, too
        given = {name: value for name, value in given.items() if name in TrainOptions.__dataclass_fields__}
        TrainOptions(**{name: value for name, value in given.items() if value is not None})


@pytest.mark.parametrize(
    "line",
    [line for line in COMMANDS if re.match(RUN, line)],
)
def test_a_command_does_what_it_is_for(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On one process; what trains or is shown does so on a small model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(2000)))
    words = shlex.split(line)
    name = words[1]
    script = words[2] if words[2:] and words[2].startswith("my_train.py:") else None
    if script is not None:
        block = next(block for block in blocks_of(ROOT / "docs/script.md") if block.language == "python")
        (tmp_path / "my_train.py").write_text(block.text)
    as_it_is = script is not None or "--device" in words  # for a card nothing runs here
    smaller = [] if as_it_is else SMALLER.get(name, [])
    if "llama-1b" in words:  # a minute of searching
        smaller = ["--model", "llama-160m", "--batch", "1", "--seq", "256", "--budget", "min"]
    monkeypatch.setattr("sys.argv", [*words, *smaller])
    cli.app(standalone_mode=False)
    said = capsys.readouterr().out
    says = {"doctor": "PyTorch", "plan": "peak   ", "train": "bitwise equal", "report": "report in"}
    assert (says | {"trace": "saved by autograd"}).get(name, "GiB") in said
    files = re.findall(r"report in (\S+)", said)
    assert all((tmp_path / file).stat().st_size > 10_000 for file in files)
    assert len(files) == (name == "report" or "--report" in words)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs Gloo")
@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if re.match("torchrun --nproc-per-node 2 ", line)]
)
def test_a_command_on_two_processes_runs(line: str, tmp_path: Path) -> None:
    """As it stands, on two processes and a small text."""
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(2000)))
    start = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:], *TWO_STEPS]
    about = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(start, cwd=tmp_path, env=about, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bitwise equal" in done.stdout
    assert all((tmp_path / file).exists() for file in re.findall(r"--report (\S+)", line))


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if re.match(r"lowtide (estimate|suggest) ", line)]
)
def test_an_estimate_answers(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", shlex.split(line))
    try:
        cli.app(standalone_mode=False)
    except EstimateError as error:
        assert "path/to/config.json" in str(error)  # the one that a page makes up
        return
    assert "GiB" in capsys.readouterr().out
