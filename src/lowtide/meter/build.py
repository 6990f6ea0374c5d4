"""Compile the counting allocator once per PyTorch build, into a per-user cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from .errors import MeterError

SOURCE = Path(__file__).with_name("counting_allocator.cpp")
COMPILE_SECONDS = 180


def cache_dir() -> Path:
    """The folder for compiled helpers: ``LOWTIDE_CACHE_DIR``, else the user's cache folder, else a private
    folder for temporary files.

    Raises:
        MeterError: when none of them is writable and ours alone.
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
    raise MeterError(
        f"no private, writable cache folder among {', '.join(map(str, places))}; set LOWTIDE_CACHE_DIR to one"
    )


def compiler() -> list[str] | None:
    """The C++ compiler's command, or ``None`` where there is none (``CXX`` names another one)."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    return None


def library() -> Path:
    """The compiled allocator, compiled now when the cache has none for this source and this PyTorch.

    Raises:
        MeterError: where there is no compiler, or it fails.
    """
    if sys.platform == "win32":
        raise MeterError(
            "the counting allocator is not built on Windows; memory is measured from the profiler's events "
            "there"
        )
    root = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-O2", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    facts = (
        SOURCE.read_text(),
        torch.__version__,
        str(torch.version.git_version),
        str(root),
        platform.machine(),
        *flags,
    )
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    target = cache_dir() / f"counting_allocator-{torch.__version__.split('+')[0]}-{key}.so"
    if target.exists():
        return target
    command = compiler()
    if command is None:
        raise MeterError(
            "no C++ compiler found (tried CXX, c++, g++, clang++); install one for exact and cheap memory "
            "counts"
        )
    link = (
        ["-undefined", "dynamic_lookup"]
        if sys.platform == "darwin"
        else [f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    )
    handle, name = tempfile.mkstemp(suffix=".so", prefix="building-", dir=target.parent)
    os.close(handle)
    try:
        said = ""
        for standard in ("c++20", "c++17"):  # what headers need moved with the release
            line = [
                *command,
                f"-std={standard}",
                *flags,
                f"-I{root / 'include'}",
                str(SOURCE),
                "-o",
                name,
                *link,
            ]
            try:
                done = subprocess.run(
                    line, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise MeterError(f"compiling the counting allocator failed: {error}") from error
            if done.returncode == 0:
                os.replace(name, target)  # atomic: whoever comes second replaces it by its equal
                return target
            said = said or done.stderr.strip()
        raise MeterError(f"compiling the counting allocator failed ({shlex.join(command)}): {said[-600:]}")
    finally:
        Path(name).unlink(missing_ok=True)
