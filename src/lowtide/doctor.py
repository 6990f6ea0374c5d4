"""`lowtide doctor`: what this machine has, what that means for a limited step, and what to do about it.

Each check is a function that returns findings. None of them changes anything but the caches that a first step
would fill, and none reaches for a network.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "note", "problem"]

OLDEST_TORCH = (2, 11)
"""Of what pyproject.toml asks for."""

MARKS: dict[State, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what, in a word or two.
        found: what is there.
        means: what that means for the user.
        state: ``ok``; ``note`` for what works in another way or could be faster; ``problem`` for what does
            not work.
        fix: what to do; empty where there is nothing to do.

    Example:
        >>> print(Finding("compiler", "none", "slower", "note", "apt-get install g++"))
        note     compiler: none
                 slower
                 to change that: apt-get install g++
    """

    subject: str
    found: str
    means: str
    state: State = "ok"
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{MARKS[self.state]:8} {self.subject}: {self.found}", self.means]
        if self.fix:
            lines.append(f"to change that: {self.fix}")
        return "\n".join([lines[0], *(f"         {line}" for line in lines[1:])])


def examine(disk: str | os.PathLike[str] | None = None, *, measure_disk: bool = True) -> list[Finding]:
    """Look at everything.

    Args:
        disk: the folder that offloaded values would go to; that for temporary files by default.
        measure_disk: whether to time the disk, which takes a few seconds and 48 MiB there.

    Returns:
        Findings in the order in which they matter. Where PyTorch is missing or too old, nothing after that.
    """
    found = _python()
    if any(finding.state == "problem" for finding in found):
        return found
    checks: list[Callable[[], Iterable[Finding]]] = [_private, _compiler, _meter, _devices, _allocator]
    checks += [_processes, _caches, lambda: _disk(disk, measure_disk), _extras]
    for check in checks:
        found += check()
    return found


def report(findings: Iterable[Finding]) -> dict[str, Any]:
    """Findings as plain data, for ``--json``."""
    return {"findings": [asdict(finding) for finding in findings]}


def _python() -> list[Finding]:
    from lowtide.version import __version__

    here = Finding("lowtide", f"{__version__}, Python {platform.python_version()}", sys.executable)
    try:
        import torch
    except ImportError as error:
        means = "nothing but `lowtide estimate` and `lowtide suggest` works"
        return [here, Finding("PyTorch", f"missing ({error})", means, "problem", "pip install 'torch>=2.11'")]
    version = str(torch.__version__)
    digits = re.match(r"(\d+)\.(\d+)", version)
    if digits is not None and (int(digits[1]), int(digits[2])) < OLDEST_TORCH:
        means = "lowtide needs 2.11 or newer"
        return [here, Finding("PyTorch", version, means, "problem", "pip install 'torch>=2.11'")]
    return [here, Finding("PyTorch", version, "as lowtide needs it")]


def _private() -> list[Finding]:
    """The private interfaces of PyTorch that lowtide rests on."""
    try:
        import lowtide.run  # noqa: F401
        from lowtide.limits import limit_memory  # noqa: F401
    except (ImportError, AttributeError) as error:
        means = "an interface of this PyTorch has moved: no step can be limited"
        fix = "pip install 'torch==2.13.0', which lowtide is tested with"
        return [Finding("PyTorch's inner parts", str(error), means, "problem", fix)]
    return [Finding("PyTorch's inner parts", "all there", "steps can be looked at and limited")]


def _compiler() -> list[Finding]:
    from lowtide.native import BuildError, compiler

    try:
        command = compiler()
    except BuildError:
        means = "steps are recorded in Python, which is slower, and not held against their budget on a CPU"
        return [Finding("C++ compiler", "none", means, "note", "apt-get install g++, or name one in CXX")]
    where = shutil.which(command[0]) or command[0]
    return [Finding("C++ compiler", where, "the meter and the recorder are compiled once, and kept")]


def _meter() -> list[Finding]:
    from lowtide.meter import MeterError, counting_allocator

    try:
        counting_allocator()
    except MeterError as error:
        means = "lowtide.measure and --compare are refused, and limited steps are not watched"
        return [Finding("meter on the CPU", "none", means, "note", str(error))]
    return [Finding("meter on the CPU", "counting allocator", "peaks are exact to the byte")]


def _devices() -> list[Finding]:
    import torch

    from lowtide.budget import auto_bytes, available_bytes, format_bytes
    from lowtide.errors import BudgetError

    found = []
    cuda = torch.cuda.is_available()
    places = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count() if cuda else 0))]
    for place in places:
        free = available_bytes(place)
        name = f"{os.cpu_count()} cores" if place == "cpu" else torch.cuda.get_device_name(place)
        if free is None:
            means = "give budgets in bytes: the system does not say what is free"
            found.append(Finding(place, name, means, "note"))
            continue
        try:
            means = f'budget="auto" would take {format_bytes(auto_bytes(free, place))}'
            found.append(Finding(place, f"{name}, {format_bytes(free)} free", means))
        except BudgetError as error:
            found.append(Finding(place, f"{name}, {format_bytes(free)} free", str(error), "note"))
    if not cuda:
        means = "models run on the CPU; estimates for cards work all the same"
        fix = "install a CUDA build of PyTorch" if shutil.which("nvidia-smi") else ""
        found.append(Finding("CUDA", "no device", means, "note" if fix else "ok", fix))
    return found


def _allocator() -> list[Finding]:
    """Settings that decide what stands between live bytes and what the system sees."""
    import torch

    found = []
    if torch.cuda.is_available():
        named = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        if "expandable_segments:True" in named:
            found.append(Finding("CUDA allocator", named, "reserved memory stays near live memory"))
        else:
            means = "fragmentation may reserve more than the budget, which counts live bytes"
            fix = "PYTORCH_ALLOC_CONF=expandable_segments:True"
            found.append(Finding("CUDA allocator", named or "PyTorch's defaults", means, "note", fix))
    if platform.libc_ver()[0] == "glibc":
        preloaded = os.environ.get("LD_PRELOAD", "")
        if "jemalloc" in preloaded or "tcmalloc" in preloaded:
            means = "freed memory may stay with the process; live bytes are counted all the same"
            found.append(Finding("C allocator", preloaded, means))
        elif os.environ.get("MALLOC_TRIM_THRESHOLD_"):
            found.append(Finding("C allocator", "glibc, keeps freed pages", "steps do not wait for pages"))
        else:
            means = "a CPU step spends time on getting freed pages back from the system"
            fix = "MALLOC_MMAP_THRESHOLD_=2147483647 MALLOC_TRIM_THRESHOLD_=2147483647 keeps them"
            found.append(Finding("C allocator", "glibc's defaults", means, "note", fix))
    return found


def _processes() -> list[Finding]:
    import torch.distributed as dist

    kinds = [
        name for name in ("gloo", "nccl", "mpi") if dist.is_available() and dist.is_backend_available(name)
    ]
    if not kinds:
        means = "no `torchrun`: parallel layers and pipelines cannot be used"
        return [Finding("several processes", "no backend", means, "note", "install another build of PyTorch")]
    return [Finding("several processes", ", ".join(kinds), "`torchrun -m lowtide train --tp 2` can run")]


def _caches() -> list[Finding]:
    from lowtide.native import BuildError, cache_dir
    from lowtide.plan.cache import folder

    found = []
    try:
        found.append(Finding("compiled helpers", str(cache_dir()), "compiled once, for all runs"))
    except BuildError as error:
        fix = "LOWTIDE_CACHE_DIR=... names a folder that only you can write to"
        found.append(Finding("compiled helpers", "nowhere", str(error), "note", fix))
    plans = folder()
    if plans is None:
        fix = "unset LOWTIDE_CACHE, or name a folder in it"
        found.append(Finding("known plans", "off", "every run plans anew", "note", fix))
    elif _writable(plans):
        found.append(Finding("known plans", str(plans), "the next run begins from them"))
    else:
        fix = "LOWTIDE_CACHE=... names a folder that can be written"
        found.append(
            Finding("known plans", f"{plans} cannot be written", "every run plans anew", "note", fix)
        )
    return found


def _writable(folder: Path) -> bool:
    """Whether it, or the folder that it would be made in, can be written to."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), None)
    return there is not None and os.access(there, os.W_OK | os.X_OK)


def _disk(path: str | os.PathLike[str] | None, measured: bool) -> list[Finding]:
    from lowtide import LowtideError, Offload, measure_links
    from lowtide.budget import format_bytes

    folder = str(path) if path is not None else tempfile.gettempdir()
    try:
        room = f"{folder}, {format_bytes(shutil.disk_usage(folder).free)} free"
        if not measured:
            return [Finding("disk tier", room, "not timed")]
        (link,) = measure_links(Offload("disk", path=folder)).values()
    except (LowtideError, OSError) as error:
        fix = "lowtide doctor --disk-path FOLDER, and policies.offload('disk', path=FOLDER)"
        return [Finding("disk tier", folder, f"values cannot be offloaded there: {error}", "note", fix)]
    write, read = link.write_bytes_per_second, link.read_bytes_per_second
    slower = min(write, read)
    means = (
        f"{slower / 1e6:,.0f} MB of activations can go there and come back for each second of forward and of "
        "backward, hidden behind them"
    )
    return [Finding("disk tier", f"{room}, {write / 1e6:,.0f} MB/s out, {read / 1e6:,.0f} MB/s in", means)]


def extras() -> dict[str, list[str]]:
    """The packages that each extra asks for, by the extra's name; empty where lowtide was not installed."""
    try:
        asked = importlib.metadata.requires("lowtide") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in asked:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name is not None and extra is not None and name[0] != "lowtide":
            found.setdefault(extra[1], []).append(name[0])
    return found


def _extras() -> list[Finding]:
    found = []
    for extra, packages in extras().items():
        missing = [package for package in packages if not _installed(package)]
        if extra == "dev":
            continue  # for those who work on lowtide
        if missing:
            fix = f"pip install 'lowtide[{extra}]'"
            found.append(
                Finding(f"extra {extra}", f"without {', '.join(missing)}", "not needed", "note", fix)
            )
        else:
            found.append(Finding(f"extra {extra}", ", ".join(packages), "there"))
    return found


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
