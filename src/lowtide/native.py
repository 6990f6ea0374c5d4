"""Compile the C++ files of this package into the per-user cache, each once per source and machine; who asks
has a slower way to do the same. What takes long is compiled by a process of its own, which runs this file and
stands still while something is timed.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_SECONDS = 600
_PAUSE, _RESUME = b"+", b"-"


class BuildError(Exception):
    """A file cannot be compiled here; the message says why, and what helps."""


@dataclass(frozen=True)
class Recipe:
    """How a file is compiled.

    Attributes:
        source: it.
        flags: the compiler's, before the file.
        libraries: after it.
        facts: versions that matter besides.
    """

    source: Path
    flags: tuple[str, ...] = ("-std=c++17", "-O2", "-shared", "-fPIC")
    libraries: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def target(self) -> Path:
        """Where the compiled file lies, or would lie.

        Raises:
            BuildError: there is no compiler, or no place.
        """
        line = " ".join([*compiler(), *self.flags, *self.libraries])
        known = (self.source.read_text(), platform.machine(), line, *self.facts)
        key = hashlib.sha256("\0".join(known).encode()).hexdigest()[:20]
        return cache_dir() / f"{self.source.stem}-{key}.so"


def cache_dir() -> Path:
    """The folder for compiled files: ``LOWTIDE_CACHE_DIR``, else the user's cache folder, else a private
    folder for temporary files.

    Raises:
        BuildError: none of them is writable and ours alone.
    """
    uid = os.getuid() if hasattr(os, "getuid") else 0
    named = os.environ.get("LOWTIDE_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    places = (
        [Path(named)] if named else [Path(home) / "lowtide", Path(tempfile.gettempdir()) / f"lowtide-{uid}"]
    )
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            facts = place.stat()
            if hasattr(os, "getuid") and (facts.st_uid != uid or facts.st_mode & 0o022):
                continue  # somebody else could swap the library under us
            if os.access(place, os.W_OK | os.X_OK):
                return place
        except OSError:
            continue
    raise BuildError(
        f"no private, writable cache folder among {', '.join(map(str, places))}; set LOWTIDE_CACHE_DIR to one"
    )


def compiler() -> list[str]:
    """The C++ compiler's command (``CXX`` names another one).

    Raises:
        BuildError: there is none.
    """
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    raise BuildError("no C++ compiler found (tried CXX, c++, g++, clang++); install one")


def _run(line: list[str]) -> None:
    subprocess.run(line, capture_output=True, text=True, timeout=_SECONDS, check=True)


def built(recipe: Recipe, run: Callable[[list[str]], None] = _run) -> Path:
    """The compiled file, compiled now where the cache has none.

    Args:
        recipe: it.
        run: runs the compiler's command.

    Raises:
        BuildError: it cannot be compiled.
    """
    target = recipe.target
    if target.exists():
        return target
    try:
        handle, name = tempfile.mkstemp(suffix=".so", prefix="building-", dir=target.parent)
        os.close(handle)
        try:
            line = [*compiler(), *recipe.flags, str(recipe.source), "-o", name, *recipe.libraries]
            run(line)
            os.replace(name, target)  # atomic: whoever comes second replaces it by its equal
        finally:
            Path(name).unlink(missing_ok=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise BuildError(f"compiling {recipe.source.name} failed: {said.strip()[-600:]}") from error
    return target


def load(source: Path) -> ctypes.CDLL | None:
    """The library made from a file with a plain C interface, or ``None`` where it cannot be compiled or
    loaded.
    """
    try:
        return ctypes.CDLL(str(built(Recipe(source))))
    except (BuildError, OSError):
        return None


@cache
def with_torch(source: Path, python: bool = False) -> Recipe:
    """How a file is compiled that uses PyTorch's own C++.

    Args:
        source: the file.
        python: it is a Python module; else it needs nothing but ``c10``.

    Raises:
        BuildError: this system has no headers for it.
    """
    import torch

    if sys.platform == "win32":
        raise BuildError(f"{source.name} is not built on Windows")
    root, headers = Path(torch.__file__).parent, sysconfig.get_paths()["include"]
    flags = ("-std=c++20", "-O2", "-shared", "-fPIC", f"-I{root / 'include'}")
    flags += (f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",)
    names = ("c10",)
    if python:
        if not (Path(headers) / "Python.h").exists():
            raise BuildError("Python's headers are not there")
        flags += ("-fvisibility=hidden", f"-I{headers}")
        names += ("torch_cpu", "torch", "torch_python")
    libraries = (f"-L{root / 'lib'}", *(f"-l{library}" for library in names))
    if sys.platform == "darwin":
        libraries = ("-undefined", "dynamic_lookup")
    return Recipe(source, flags, libraries, (torch.__version__, str(torch.version.git_version), sys.version))


def extension(source: Path, name: str, *, wait: bool = False) -> ModuleType | None:
    """The Python module ``name`` made from a file that uses PyTorch's own C++, or ``None`` where that cannot
    be done or is not done yet.

    Args:
        source: the file. It takes half a minute to compile, once for each PyTorch and Python.
        name: of the module.
        wait: compile it here; else another process does, and who asks again finds it.
    """
    try:
        recipe = with_torch(source, python=True)
        if not wait and not recipe.target.exists():
            _beside().start(recipe)
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, str(built(recipe)))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    except (BuildError, ImportError):
        return None


@dataclass
class _Beside:
    """Processes that compile beside this one, and how many who time something want them to stand still.

    They are told through a pipe: when this process is gone, however it ended, they go on.
    """

    started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)
    waiting: int = 0

    def start(self, recipe: Recipe) -> None:
        """Start a process that compiles, unless this one has."""
        if recipe.source in self.started:
            return
        told = json.dumps({**asdict(recipe), "source": str(recipe.source)})
        with suppress(OSError):
            self.started[recipe.source] = subprocess.Popen(
                [sys.executable, "-I", __file__, told],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.tell(_PAUSE * self.waiting)

    def tell(self, what: bytes) -> None:
        """Tell those that still run."""
        for process in self.started.values():
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.write(what)


@cache
def _beside() -> _Beside:
    return _Beside()


@contextmanager
def builds_paused() -> Iterator[None]:
    """What is compiled beside this process stands still meanwhile: something is timed.

    A compiler on one of two cores makes operations that run on both take five times as long.
    """
    beside = _beside()
    beside.waiting += 1
    beside.tell(_PAUSE)
    try:
        yield
    finally:
        beside.waiting -= 1
        beside.tell(_RESUME)


def _alone(recipe: Recipe) -> None:
    """Compile unless another process is at it."""
    if recipe.target.exists():
        return
    mark = recipe.target.with_suffix(".building")
    if mark.exists() and time.time() - mark.stat().st_mtime > _SECONDS:
        mark.unlink(missing_ok=True)  # whoever made it is gone
    try:
        mark.touch(exist_ok=False)
    except OSError:
        return
    try:
        os.nice(10)
        built(recipe, _run_obediently)
    finally:
        mark.unlink(missing_ok=True)


def _run_obediently(line: list[str]) -> None:
    """Run a command that stands still when that is said on standard input."""
    quiet: dict[str, Any] = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, process_group=0, **quiet)
    threading.Thread(target=_obey, args=(process.pid,), daemon=True).start()
    try:
        failed = process.wait(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if failed:
        raise OSError(f"{line[0]} failed")


def _obey(group: int) -> None:
    waiting = 0
    with suppress(ProcessLookupError):
        while word := os.read(sys.stdin.fileno(), 1):
            waiting += 1 if word == _PAUSE else -1
            os.killpg(group, signal.SIGSTOP if waiting else signal.SIGCONT)
        os.killpg(group, signal.SIGCONT)  # who asked is gone


if __name__ == "__main__":
    with suppress(BuildError):
        told = json.loads(sys.argv[1])
        lists = {name: tuple(items) for name, items in told.items() if name != "source"}
        _alone(Recipe(Path(told["source"]), **lists))
