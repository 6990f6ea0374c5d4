"""What is compiled beside a process stands still while that times something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lowtide import native

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to ask")

_COMPILER = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""


def until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> native.Recipe:
    script, told = tmp_path / "compiler.py", tmp_path / "process"
    script.write_text(_COMPILER)
    source = tmp_path / "slow.cpp"
    source.write_text("int one() { return 1; }")
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", f"{sys.executable} {script} {told}")
    beside = native._Beside()
    monkeypatch.setattr(native, "_beside", lambda: beside)
    return native.Recipe(source)


def test_a_build_stands_still_while_something_is_timed(building: native.Recipe, tmp_path: Path) -> None:
    told = tmp_path / "process"
    with native.builds_paused():
        native._beside().start(building)
    assert until(lambda: told.exists() and told.read_text().isdigit())
    compiler = int(told.read_text())
    try:
        assert until(lambda: not stopped(compiler))
        with native.builds_paused():
            assert until(lambda: stopped(compiler))
            with native.builds_paused():
                pass
            assert stopped(compiler)
        assert until(lambda: not stopped(compiler))
    finally:
        with suppress(ProcessLookupError):
            os.kill(compiler, signal.SIGKILL)
    native._beside().started[building.source].wait(20)
    assert not list((tmp_path / "cache").iterdir())  # neither a mark nor half a file


_DIES = """
import os, signal, sys, time
from pathlib import Path
from lowtide import native
beside, told = native._beside(), Path(sys.argv[2])
beside.start(native.Recipe(Path(sys.argv[1])))
while not (told.exists() and told.read_text()):
    time.sleep(0.005)
with native.builds_paused():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_build_goes_on_when_who_paused_it_is_gone(building: native.Recipe, tmp_path: Path) -> None:
    told = tmp_path / "process"
    subprocess.run([sys.executable, "-c", _DIES, str(building.source), str(told)], start_new_session=True)
    compiler = int(told.read_text())
    try:
        assert until(lambda: not stopped(compiler))
    finally:
        with suppress(ProcessLookupError):
            os.kill(compiler, signal.SIGKILL)
