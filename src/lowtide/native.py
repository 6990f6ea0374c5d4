"""Compile a small C++ file with a plain C interface into the per-user cache, once per source and machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC")
_SECONDS = 120


def load(source: Path) -> ctypes.CDLL | None:
    """The library made from ``source``, or ``None`` where it cannot be compiled or loaded: the caller has a
    slower way to do the same.
    """
    from lowtide.meter.build import cache_dir, compiler
    from lowtide.meter.errors import MeterError

    command = compiler()
    if command is None:
        return None
    text = source.read_bytes()
    key = hashlib.sha256(
        b"\0".join([text, platform.machine().encode(), " ".join([*command, *_FLAGS]).encode()])
    ).hexdigest()[:20]
    try:
        target = cache_dir() / f"{source.stem}-{key}.so"
        if not target.exists():
            handle, name = tempfile.mkstemp(suffix=".so", prefix="building-", dir=target.parent)
            os.close(handle)
            try:
                line = [*command, *_FLAGS, str(source), "-o", name]
                subprocess.run(line, capture_output=True, timeout=_SECONDS, check=True)
                os.replace(name, target)
            finally:
                Path(name).unlink(missing_ok=True)
        return ctypes.CDLL(str(target))
    except (MeterError, OSError, subprocess.SubprocessError):
        return None
