"""Compile the C++ files of this package into the per-user cache, each once per source and machine; who asks
has a slower way to do the same.
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
from collections.abc import Sequence
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


def extension(source: Path, name: str) -> ModuleType | None:
    """The Python module ``name`` made from a file that uses PyTorch's own C++, or ``None`` likewise.

    It takes half a minute to compile, once for each PyTorch and Python.
    """
    import torch

    root, headers = Path(torch.__file__).parent, sysconfig.get_paths()["include"]
    if sys.platform == "win32" or not (Path(headers) / "Python.h").exists():
        return None
    flags = ("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{headers}")
    flags += (f"-I{root / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    libraries = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else (f"-L{root / 'lib'}",)
    libraries += tuple(f"-l{library}" for library in ("c10", "torch_cpu", "torch", "torch_python"))
    built = _built(source, flags, libraries, torch.__version__, str(torch.version.git_version), sys.version)
    if built is None:
        return None
    try:
        loader = importlib.machinery.ExtensionFileLoader(name, str(built))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    except ImportError:
        return None


def _built(source: Path, flags: Sequence[str], libraries: Sequence[str], *facts: str) -> Path | None:
    from lowtide.meter.build import cache_dir, compiler
    from lowtide.meter.errors import MeterError

    command = compiler()
    if command is None:
        return None
    line = " ".join([*command, *flags, *libraries])
    known = (source.read_text(), platform.machine(), line, *facts)
    key = hashlib.sha256("\0".join(known).encode()).hexdigest()[:20]
    try:
        target = cache_dir() / f"{source.stem}-{key}.so"
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
    except (MeterError, OSError, subprocess.SubprocessError):
        return None
