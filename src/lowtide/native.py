"""Compile the C++ files of this package into the per-user cache, each once per source and machine."""

from __future__ import annotations

import ctypes
import fcntl
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
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal

from lowtide.errors import LowtideError
from lowtide.progress import working


class BuildError(Exception):
    """A file cannot be compiled here; the message says why, and what helps."""


_NO_FOLDER = ("off", "0", "no", "false")
"""Values of ``LOWTIDE_CACHE`` that name no folder: in 0.1.0 they turned the cache of plans off."""


def cache_folder() -> Path:
    """The folder for what lowtide keeps: ``LOWTIDE_CACHE``, else the user's cache folder.

    Raises:
        LowtideError: the variable's earlier name is set, which nothing reads any more.
    """
    if "LOWTIDE_CACHE_DIR" in os.environ:
        raise LowtideError(
            "LOWTIDE_CACHE_DIR is not read any more: name the folder in LOWTIDE_CACHE, which is for compiled "
            "helpers, and unset LOWTIDE_CACHE_DIR"
        )
    named = os.environ.get("LOWTIDE_CACHE", "")
    if named and named.lower() not in _NO_FOLDER:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"


def cache_dir() -> Path:
    """The folder for compiled files: `cache_folder`, else a private folder for temporary files.

    Raises:
        BuildError: none of them is writable and ours alone.
    """
    uid = os.getuid()
    places = [cache_folder(), Path(tempfile.gettempdir()) / f"lowtide-{uid}"]
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            facts = place.stat()
            if facts.st_uid != uid or facts.st_mode & 0o022:
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
        BuildError: there is none, or not the one that is named.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for words in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(words[0]):
            return words
    raise BuildError(
        f"CXX names {named[0]}, which is not there"
        if named
        else "no C++ compiler found (tried c++, g++ and clang++)"
    )


def build(source: Path, uses: Literal["", "c10", "torch"] = "") -> Path:
    """The compiled file, compiled now where the cache has none.

    Args:
        source: a C++ file. Headers beside it are part of it.
        uses: what of PyTorch's own C++ it needs: nothing, ``c10`` alone, or, as a Python module, all of it.

    Raises:
        BuildError: it cannot be compiled.
    """
    target, command, libraries = _how(source, uses)
    name = source.name
    if target.exists():
        return target
    try:
        with (
            _lock(target),
            tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as folder,
            working("compiling", f"compiled {name}") as work,
        ):
            if target.exists():  # another process was at it
                return target
            made = Path(folder) / target.name
            line = [*command, str(source), "-o", str(made), *libraries]
            with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
                said = ""
                while process.returncode is None:
                    work.say(f"compiling {name}, once for this PyTorch and Python")
                    with suppress(subprocess.TimeoutExpired):
                        _, said = process.communicate(timeout=0.5)
            if process.returncode:
                why = said.strip()[-600:] or f"{command[0]} ended with {process.returncode} and says nothing"
                raise BuildError(f"compiling {name} failed: {why}")
            os.replace(made, target)
            work.done("once for this PyTorch and Python")
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"compiling {name} failed: {error}") from error
    return target


def takes_long(source: Path, uses: Literal["", "c10", "torch"] = "") -> bool:
    """Whether `build` would compile the file now."""
    try:
        return not _how(source, uses)[0].exists()
    except (BuildError, OSError):
        return False


def _how(source: Path, uses: str) -> tuple[Path, list[str], tuple[str, ...]]:
    """The compiled file's place, and the command that makes it: what comes before the source, and after it.

    Raises:
        BuildError: it cannot be compiled.
    """
    assert source.is_file(), f"{source} is missing: without it all would run, slower, in Python"
    flags, libraries, facts = _options(source, uses)
    command = [*compiler(), *flags]
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    known = (*texts, platform.machine(), " ".join([*command, *libraries]), *facts)
    key = hashlib.sha256("\0".join(known).encode()).hexdigest()[:20]
    return cache_dir() / f"{source.stem}-{key}.so", command, libraries


def _options(source: Path, uses: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The compiler's flags, the libraries behind the file, and the versions that matter besides.

    Raises:
        BuildError: this system has no headers for it.
    """
    if not uses:
        return ("-std=c++17", "-O3", "-shared", "-fPIC"), (), ()
    import torch

    root, headers = Path(torch.__file__).resolve().parent, sysconfig.get_paths()["include"]
    flags = ("-std=c++20", "-O2", "-DNDEBUG", "-shared", "-fPIC", f"-I{root / 'include'}")
    flags += (f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",)
    names = ("c10",)
    if uses == "torch":
        if not (Path(headers) / "Python.h").exists():
            raise BuildError("Python's headers are not there")
        flags += ("-fvisibility=hidden", f"-I{headers}")
        names += ("torch_cpu", "torch", "torch_python")
    libraries = (f"-L{root / 'lib'}", *(f"-l{library}" for library in names))
    if sys.platform == "darwin":
        libraries = ("-undefined", "dynamic_lookup")
    return flags, libraries, (torch.__version__, str(torch.version.git_version), sys.version)


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """One process of this machine compiles the file, the others wait; the system opens the lock of one that
    dies.
    """
    with target.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def load(source: Path) -> ctypes.CDLL | None:
    """The library made from a file with a plain C interface, or ``None`` where it cannot be compiled or
    loaded.
    """
    try:
        return ctypes.CDLL(str(build(source)))
    except (BuildError, OSError):
        return None


@cache
def extension(source: Path, name: str) -> ModuleType:
    """The Python module ``name`` made from a file that uses PyTorch's own C++. It takes half a minute to
    compile, once for each PyTorch and Python.

    Raises:
        LowtideError: it cannot be compiled here; says why, and how to get a compiler.
    """
    try:
        loader = importlib.machinery.ExtensionFileLoader(name, str(build(source, "torch")))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    except (BuildError, ImportError) as error:
        raise LowtideError(
            f"lowtide compiles its executor once, and cannot do so here: {error}. Install a C++ compiler and "
            "Python's headers (Debian and Ubuntu: apt-get install g++ python3-dev; Fedora: dnf install "
            "gcc-c++ python3-devel; macOS: xcode-select --install; conda: conda install cxx-compiler)"
        ) from error
