"""Compile the C++ files of this package into the per-user cache, each once per source and machine; who asks
has a slower way to do the same. What takes long is compiled by a process of its own: ``python -m
lowtide.native FILE``.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC")
_SECONDS = 600


def load(source: Path) -> ctypes.CDLL | None:
    """The library made from a file with a plain C interface, or ``None`` where it cannot be compiled or
    loaded.
    """
    built = _built(source, _FLAGS, ())
    try:
        return ctypes.CDLL(str(built)) if built is not None else None
    except OSError:
        return None


def extension(source: Path, name: str, *, wait: bool = False) -> ModuleType | None:
    """The Python module ``name`` made from a file that uses PyTorch's own C++, or ``None`` where that cannot
    be done or is not done yet.

    Args:
        source: the file. It takes half a minute to compile, once for each PyTorch and Python.
        name: of the module.
        wait: compile it here; else another process does, and who asks again finds it.
    """
    found = _extension_target(source)
    if found is None:
        return None
    target, line = found
    if not target.exists():
        if not wait:
            _compile_beside(source)
            return None
        if _built(source, *line) is None:
            return None
    try:
        loader = importlib.machinery.ExtensionFileLoader(name, str(target))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    except ImportError:
        return None


@cache
def _compile_beside(source: Path) -> None:
    """Start a process that compiles the file, unless there is one. It outlives this one."""
    with suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", "lowtide.native", str(source)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def _alone(source: Path) -> None:
    """Compile an extension unless another process is at it."""
    found = _extension_target(source)
    if found is None or found[0].exists():
        return
    target, line = found
    mark = target.with_suffix(".building")
    if mark.exists() and time.time() - mark.stat().st_mtime > _SECONDS:
        mark.unlink(missing_ok=True)  # whoever made it is gone
    try:
        mark.touch(exist_ok=False)
    except OSError:
        return
    try:
        os.nice(10)
        _built(source, *line)
    finally:
        mark.unlink(missing_ok=True)


_Line = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Flags, libraries, and versions that matter."""


@cache
def _extension_target(source: Path) -> tuple[Path, _Line] | None:
    """Where an extension of PyTorch lies once it is compiled, and how it is."""
    import torch

    root, headers = Path(torch.__file__).parent, sysconfig.get_paths()["include"]
    if sys.platform == "win32" or not (Path(headers) / "Python.h").exists():
        return None
    flags = ("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{headers}")
    flags += (f"-I{root / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    libraries = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else (f"-L{root / 'lib'}",)
    libraries += tuple(f"-l{library}" for library in ("c10", "torch_cpu", "torch", "torch_python"))
    line = flags, libraries, (torch.__version__, str(torch.version.git_version), sys.version)
    target = _target(source, *line)
    return (target, line) if target is not None else None


def _target(
    source: Path, flags: Sequence[str], libraries: Sequence[str], facts: Sequence[str]
) -> Path | None:
    """Where the compiled file lies, or would lie; ``None`` without a compiler or a place."""
    from lowtide.meter.build import cache_dir, compiler
    from lowtide.meter.errors import MeterError

    command = compiler()
    if command is None:
        return None
    line = " ".join([*command, *flags, *libraries])
    known = (source.read_text(), platform.machine(), line, *facts)
    key = hashlib.sha256("\0".join(known).encode()).hexdigest()[:20]
    try:
        return cache_dir() / f"{source.stem}-{key}.so"
    except (MeterError, OSError):
        return None


def _built(
    source: Path, flags: Sequence[str], libraries: Sequence[str], facts: Sequence[str] = ()
) -> Path | None:
    from lowtide.meter.build import compiler

    target, command = _target(source, flags, libraries, facts), compiler()
    if target is None or command is None:
        return None
    try:
        if not target.exists():
            handle, name = tempfile.mkstemp(suffix=".so", prefix="building-", dir=target.parent)
            os.close(handle)
            try:
                subprocess.run(
                    [*command, *flags, str(source), "-o", name, *libraries],
                    capture_output=True,
                    timeout=_SECONDS,
                    check=True,
                )
                os.replace(name, target)
            finally:
                Path(name).unlink(missing_ok=True)
        return target
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    _alone(Path(sys.argv[1]))
