"""Compile the C++ files of this package into the per-user cache, each once per source and machine. Where that
cannot be done, who asks has a slower way to do the same.
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
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from lowtide.progress import working

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None


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


NO_CACHE = ("off", "0", "no", "false")
"""Values of ``LOWTIDE_CACHE`` with which no plans are kept."""


def cache_folder() -> Path:
    """The folder for what lowtide keeps: ``LOWTIDE_CACHE``, else the user's cache folder."""
    named = os.environ.get("LOWTIDE_CACHE", "")
    if named and named.lower() not in NO_CACHE:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"


def cache_dir() -> Path:
    """The folder for compiled files: `cache_folder`, else a private folder for temporary files.

    Raises:
        BuildError: none of them is writable and ours alone.
    """
    uid = os.getuid() if hasattr(os, "getuid") else 0
    places = [cache_folder(), Path(tempfile.gettempdir()) / f"lowtide-{uid}"]
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
        f"no private, writable cache folder among {', '.join(map(str, places))}; set LOWTIDE_CACHE to one"
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
    name = recipe.source.name
    try:
        with (
            _lock(target),
            tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as folder,
            working("compiling", f"compiled {name}") as work,
        ):
            if target.exists():  # another process was at it
                return target
            made = Path(folder) / target.name
            with subprocess.Popen(recipe.line(made), stderr=subprocess.PIPE, text=True) as process:
                said = ""
                while process.returncode is None:
                    work.say(f"compiling {name}, once for this PyTorch and Python")
                    with suppress(subprocess.TimeoutExpired):
                        _, said = process.communicate(timeout=0.5)
            if process.returncode:
                raise BuildError(f"compiling {name} failed: {said.strip()[-600:]}")
            os.replace(made, target)
            work.done("once for this PyTorch and Python")
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"compiling {name} failed: {error}") from error
    return target


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """One process of this machine compiles the file, the others wait; the system opens the lock of one that
    dies.
    """
    if fcntl is None:
        yield
        return
    with target.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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


@cache
def extension(source: Path, name: str) -> ModuleType | None:
    """The Python module ``name`` made from a file that uses PyTorch's own C++, or ``None`` where that cannot
    be done. It takes half a minute to compile, once for each PyTorch and Python.
    """
    try:
        loader = importlib.machinery.ExtensionFileLoader(name, str(built(with_torch(source, python=True))))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    except (BuildError, ImportError):
        return None
