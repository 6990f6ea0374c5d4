"""Progress: lines in the log, a bar on a terminal alone, and ways to turn it off."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import lowtide
from lowtide import progress
from lowtide.progress import Work, current, mute, place, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error as a person at a terminal has it."""
    for name in ("LOWTIDE_PROGRESS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    found = Terminal()
    # pytest puts its own back between fixture and test
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.0)
    return found


def planning(progress: bool | None = None) -> None:
    with working("planning", "planned", progress) as work:
        work.say("tracing")
        with working("searching", "searched") as inner:
            for _ in inner.each("timing operations", range(3)):
                pass
            inner.done("nobody sees this")
        work.done("60 % of the memory, +12 % time")


def test_a_terminal_has_a_bar_and_one_line_at_the_end(terminal: Terminal) -> None:
    before = threading.active_count()
    planning()
    shown = terminal.getvalue()
    assert "lowtide: tracing" in shown and "lowtide: timing operations" in shown
    assert re.search(r"lowtide: planned in [0-9.]+ s: 60 % of the memory, \+12 % time\n", shown)
    assert "searched" not in shown and shown.count("planned") == 1, "what is inside has no line of its own"
    assert threading.active_count() == before, "no thread stays that would disturb what is timed"


@pytest.mark.parametrize("way", ["argument", "environment", "level", "mute", "rank", "short"])
def test_ways_to_turn_it_off(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "environment":
        monkeypatch.setenv("LOWTIDE_PROGRESS", "0")
    if way == "rank":
        monkeypatch.setenv("RANK", "1")
    if way == "short":
        monkeypatch.setattr(progress, "AFTER_SECONDS", 60.0)
    if way == "level":
        monkeypatch.setattr(progress.log, "level", logging.ERROR)
    if way == "mute":
        with mute():
            planning(True)
    else:
        planning(False if way == "argument" else None)
    assert terminal.getvalue() == ""


def test_an_argument_goes_before_the_environment(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_PROGRESS", "0")
    assert place() == "nowhere" and place(True) == "terminal"


def test_without_a_terminal_short_work_is_told_to_the_log_alone(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, "lowtide"):
        planning(True)
    assert capsys.readouterr() == ("", "")
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG", "INFO"]
    assert re.fullmatch(r"planned in [0-9.]+ s: 60 % of the memory, \+12 % time", caplog.messages[-1])


def test_without_a_terminal_long_work_has_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiler that takes a minute, in a notebook or a log, was silent."""
    for name in ("LOWTIDE_PROGRESS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    clock = iter([0.0, 1.0, 4.0, 5.5, 6.0, 9.0, 10.5, 19.0, 21.0, 29.0, 30.0, 31.5])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with working("compiling", "compiled") as work:
        work.say("compiling recorder.cpp")
        for _ in range(9):
            work.tick()
        work.done("once for this PyTorch")
    assert capsys.readouterr().err.splitlines() == [
        "lowtide: compiling recorder.cpp, 6 s so far",
        "lowtide: compiling recorder.cpp, 10 s so far",
        "lowtide: compiling recorder.cpp, 21 s so far",
        "lowtide: compiling recorder.cpp, 30 s so far",
        "lowtide: compiled in 31.5 s: once for this PyTorch",
    ]


def test_what_will_be_silent_is_said_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An import or PyTorch's compiler takes many seconds and calls nothing of ours."""
    for name in ("LOWTIDE_PROGRESS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with working("planning", "planned") as work:
        work.say("importing transformers", silent=True)
        now[0] = 2.0
        work.say("building a model", silent=True)  # so soon after a line it has none
        now[0] = 9.5
        work.say("compiling", silent=True)
        now[0] = 11.0
        for _ in work.each("timing operations", ["mm", "gelu"]):
            now[0] += 8.0
    assert capsys.readouterr().err.splitlines() == [
        "lowtide: importing transformers ...",
        "lowtide: compiling, 10 s so far",
        "lowtide: timing operations (2 of 2), 27 s so far",
    ]


@pytest.mark.parametrize("way", ["steps", "pieces"])
def test_work_that_takes_long_says_once_in_the_log_that_it_is_under_way(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.3)
    with caplog.at_level(logging.INFO, "lowtide"), working("planning", "planned") as work:
        work.say("rounding")
        assert not caplog.messages, "it may be over soon"
        time.sleep(0.35)
        for text in ("searching", "comparing") if way == "steps" else ():
            work.say(text)
        for _ in work.each("searching", range(3)) if way == "pieces" else ():
            pass
        (line,) = caplog.messages
    assert re.fullmatch(r"planning, 0\.[0-9] s so far: searching", line)


def test_a_log_that_has_the_line_is_not_told_it_twice(
    terminal: Terminal, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lowtide"):
        planning()
    assert "planned" in caplog.text and "planned" not in terminal.getvalue()


def test_what_fails_has_no_line_and_leaves_nothing_behind(terminal: Terminal) -> None:
    with pytest.raises(ZeroDivisionError), working("planning", "planned") as work:
        work.done("60 % of the memory")
        raise ZeroDivisionError
    assert "planned" not in terminal.getvalue()
    assert current().what == "", "the next one is its own"


def test_a_bar_is_cheap_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_bar", lambda: pytest.fail("there is no terminal"))
    with working("planning", "planned") as work:
        assert list(work.each("timing operations", [1, 2, 3])) == [1, 2, 3]
    assert isinstance(current(), Work)


def test_planning_says_what_it_came_to(caplog: pytest.LogCaptureFixture) -> None:
    import torch

    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(6))
    )
    with caplog.at_level(logging.DEBUG, "lowtide"):
        handle = lowtide.limit_memory(model, "60%", loss_fn=torch.sum)
        plan = handle.prepare(torch.randn(512, 32))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(lines) == 1 and lines[0].startswith("planned in ")
    assert f"{100 * plan.predicted_peak_bytes / plan.plain_peak_bytes:.0f} % of the memory, +" in lines[0]
    assert any(text.startswith("planning: planning ") for text in caplog.messages)


def test_a_real_terminal() -> None:
    """The bar in a process of its own, on a pseudo-terminal."""
    code = (
        "import time\nfrom lowtide import progress\nprogress.AFTER_SECONDS = 0.0\n"
        "with progress.working('planning', 'planned') as work:\n"
        "    for _ in work.each('timing operations', range(3)):\n        time.sleep(0.12)\n  "
        "  work.done('all of it')\n"
    )
    outer, inner = pty.openpty()
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOWTIDE_PROGRESS", "RANK")
    }
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=inner, env={**environment, "TERM": "xterm"}
    ) as process:
        assert process.wait(60) == 0
    os.close(inner)
    shown = os.read(outer, 1 << 16).decode()
    os.close(outer)
    assert "timing operations" in shown and "planned in 0." in shown and "all of it" in shown


def test_a_setting_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_PROGRESS", "banana")
    with pytest.raises(lowtide.LowtideError, match="LOWTIDE_PROGRESS is 'banana': 0 turns progress off"):
        place()


def test_the_comparison_of_two_steps_says_at_which_pair_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve steps of seconds each, one after the other, were silent off a terminal."""
    import torch

    from lowtide.train.compare import compare

    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(4, 8)
    handle = lowtide.limit_memory(model, "100%", loss_fn=torch.sum, progress=False)
    handle.prepare(x)
    for name in ("LOWTIDE_PROGRESS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    clock = itertools.count(0.0, 20.0)  # so each sign has a line
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=clock.__next__))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compare(model, handle, optimizer, lambda: model(x).sum(), torch.device("cpu"), pairs=2)
    told = capsys.readouterr().err
    for pairs in range(3):
        assert f"lowtide: measuring pairs of a plain and a planned step ({pairs} of 2), " in told
    assert told.index("measuring a planned step") < told.index("measuring a plain step")
