"""Compile the C++ files of this package into the per-user cache, each once per source and machine; who asks
has a slower way to do the same. What takes long is compiled by a process of its own, which stands still while
something is timed.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

_SECONDS = 600
_COMPILE = '''trap "" HUP; trap 'rm -f "$made" "$mark"' EXIT; made=$1 mark=$2 target=$3; shift 3
nice -n 10 "$@" && mv "$made" "$target"'''


class BuildError(Exception):
    """A file cannot be compiled here; the message says why, and what helps."""


@dataclass(frozen=True)
class Recipe:
    """How a file is compiled.

    Attributes:
        source: it. Headers beside it are part of it.
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
        headers = sorted(self.source.parent.glob("*.h"))
        texts = [path.read_text() for path in (self.source, *headers)]
        known = (*texts, platform.machine(), line, *self.facts)
        key = hashlib.sha256("\0".join(known).encode()).hexdigest()[:20]
        return cache_dir() / f"{self.source.stem}-{key}.so"

    def line(self, made: Path) -> list[str]:
        """The command that compiles it to ``made``."""
        return [*compiler(), *self.flags, str(self.source), "-o", str(made), *self.libraries]


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


def built(recipe: Recipe) -> Path:
    """The compiled file, compiled now where the cache has none.

    Raises:
        BuildError: it cannot be compiled.
    """
    target = recipe.target
    if target.exists():
        return target
    try:
        with tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as folder:
            made = Path(folder) / target.name
            subprocess.run(recipe.line(made), capture_output=True, text=True, timeout=_SECONDS, check=True)
            os.replace(made, target)  # atomic: whoever comes second replaces it by its equal
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise BuildError(f"compiling {recipe.source.name} failed: {said.strip()[-600:]}") from error
    return target


@cache
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
    flags = ("-std=c++20", "-O2", "-DNDEBUG", "-shared", "-fPIC", f"-I{root / 'include'}")
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


def extension(source: Path, name: str, *, wait: bool) -> ModuleType | None:
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
    """Compilers that run beside this process, and how many who time something want them to stand still.

    Each is a process group of this session: when this process is gone, however it ended, the system lets a
    group go on that stands still.
    """

    started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)
    waiting: int = 0

    def start(self, recipe: Recipe) -> None:
        """Start compiling, unless this process has, or another one is at it."""
        if recipe.source in self.started:
            return
        target = recipe.target
        made, mark = (target.with_suffix(f".{what}") for what in ("made", "building"))
        with suppress(OSError):
            if mark.exists() and time.time() - mark.stat().st_mtime > _SECONDS:
                mark.unlink(missing_ok=True)  # whoever made it is gone
            mark.touch(exist_ok=False)
            self.started[recipe.source] = subprocess.Popen(
                ["sh", "-c", _COMPILE, "sh", str(made), str(mark), str(target), *recipe.line(made)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            if self.waiting:
                self.tell(signal.SIGSTOP)

    def tell(self, what: signal.Signals) -> None:
        """Tell those that still run."""
        for process in self.started.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, what)


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
    if beside.waiting == 1:
        beside.tell(signal.SIGSTOP)
    try:
        yield
    finally:
        beside.waiting -= 1
        if not beside.waiting:
            beside.tell(signal.SIGCONT)
