"""`lowtide doctor`: what this machine has, what that means for a limited step, and what to do about it.

Each check is a function that returns findings. None of them changes anything but the caches that a first step
would fill, and none reaches for a network.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from typing import Literal

from lowtide.words import count_text

Verdict = Literal["ok", "note", "problem"]

OLDEST_TORCH = (2, 11)
"""The oldest PyTorch that pyproject.toml allows."""

MARKS: dict[Verdict, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


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
        >>> print(Finding("compiler", "none", "no limits", "note", "apt-get install g++"))
        note     compiler: none
                 no limits
                 to change that: apt-get install g++
    """

    subject: str
    found: str
    means: str
    state: Verdict = "ok"
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{MARKS[self.state]:8} {self.subject}: {self.found}", self.means]
        if self.fix:
            lines.append(f"to change that: {self.fix}")
        return "\n".join([lines[0], *(f"         {line}" for line in lines[1:])])


def examine() -> list[Finding]:
    """Look at everything.

    Returns:
        Findings in the order in which they matter. Where PyTorch is missing or too old, nothing after that.
    """
    found = _python()
    if any(finding.state == "problem" for finding in found):
        return found
    for check in (_private, _compiler, _meter, _devices, _queues, _allocator):
        found += check()
    return found


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
    return [Finding("PyTorch's inner parts", "all there", "steps can be profiled and limited")]


def _compiler() -> list[Finding]:
    from lowtide.meter import MeterError, counting_allocator
    from lowtide.native import BuildError, cache_dir, cache_folder, compiler

    means = "no step can be limited: the executor is compiled at its first use"
    other = "apt-get install g++ python3-dev, or set CXX to a compiler that works"
    own = "set LOWTIDE_CACHE to a folder that only you can write to"
    try:
        command = compiler()
    except BuildError as error:
        return [Finding("C++ compiler", str(error), means, "problem", other)]
    try:
        used, wanted = cache_dir(), cache_folder()
    except BuildError as error:
        return [Finding("cache", str(error), means, "problem", own)]
    where = shutil.which(command[0]) or command[0]
    try:
        counting_allocator()
    except MeterError as error:
        return [Finding("C++ compiler", f"{where} ({error})", means, "problem", other)]
    found = [Finding("C++ compiler", where, f"the meter and the executor are compiled once, into {used}")]
    if used != wanted:
        means = f"plans are not kept; compiled files are in {used}"
        found.append(Finding("cache", f"{wanted} cannot be used", means, "note", own))
    return found


def _meter() -> list[Finding]:
    from lowtide.meter import available

    if not available():
        means = "lowtide.measure reads the profiler, which is slow"
        return [
            Finding("meter on the CPU", "profiler", means, "note", "see the C++ compiler or the cache above")
        ]
    return [Finding("meter on the CPU", "counting allocator", "peaks are exact to the byte")]


def _devices() -> list[Finding]:
    import torch

    from lowtide import accelerator
    from lowtide.budget import auto_bytes, available_bytes, format_bytes
    from lowtide.errors import BudgetError

    found = []
    gpus = accelerator.all_devices()
    for place in ("cpu", *map(str, gpus)):
        free = available_bytes(place)
        name = (
            count_text(os.cpu_count() or 1, "core")
            if place == "cpu"
            else accelerator.name_of(torch.device(place))
        )
        if free is None:
            means = "give budgets in bytes: the system does not say what is free"
            found.append(Finding(place, name, means, "note"))
            continue
        try:
            means = f'budget="auto" would take {format_bytes(auto_bytes(free, place))}'
            found.append(Finding(place, f"{name}, {format_bytes(free)} free", means))
        except BudgetError as error:
            found.append(Finding(place, f"{name}, {format_bytes(free)} free", str(error), "note"))
    if not gpus:
        means = "models run on the CPU; estimates for GPUs work, too"
        fix = "install a CUDA build of PyTorch" if shutil.which("nvidia-smi") else ""
        found.append(Finding("CUDA", "no device", means, "note" if fix else "ok", fix))
    return found


def _queues() -> list[Finding]:
    """Whether collectives start before the products that are launched after them."""
    from lowtide import accelerator

    if len(accelerator.all_devices()) < 2 or not accelerator.orders_by_one_queue():
        return []
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if given == "1":
        return [Finding("CUDA queues", "one", "collectives overlap with matrix products")]
    means = "a matrix product may occupy the whole GPU, so that a collective cannot overlap with it"
    fix = "export CUDA_DEVICE_MAX_CONNECTIONS=1 where layers are tensor parallel (not with FSDP2)"
    return [Finding("CUDA queues", given or "CUDA's default of 8", means, "note", fix)]


def _reserved_by_a_step() -> tuple[int, int, int]:
    """Of a step of GPT-2 in bfloat16 that recomputes each block, traced on fake tensors: its peak, and what
    PyTorch's allocator would reserve for it by default, and with expandable segments.
    """
    import torch

    from lowtide.models import build_model
    from lowtide.models.build import untouched
    from lowtide.plan import make
    from lowtide.plan.reserved_bytes import reserved_either_way
    from lowtide.trace.fake import trace_fake

    model = untouched(lambda: build_model("gpt2").bfloat16(), torch.device("cpu"))
    tokens = torch.zeros(8, 1024, dtype=torch.long)
    graph = trace_fake(lambda one: model(one, one).loss, (tokens,), {}, [model], "cpu", lambda specs: {})
    plan = make(graph, policy="full")
    return plan.predicted_peak_bytes, *reserved_either_way(graph, plan.stored)


def _reserves(named: str, peak: int, default: int, expandable: int) -> Finding:
    """What the allocator's settings mean, by what one step would reserve under either."""
    from lowtide.budget import format_bytes, would_reserve

    means = f"a step of GPT-2 that requests {format_bytes(peak)}: {would_reserve(default, expandable)}"
    if "expandable_segments:True" in named or default <= expandable:
        return Finding("CUDA allocator", named or "PyTorch's defaults", means)
    fix = "PYTORCH_ALLOC_CONF=expandable_segments:True, or limit_memory(..., reserved=True)"
    return Finding("CUDA allocator", named or "PyTorch's defaults", means, "note", fix)


def _allocator() -> list[Finding]:
    """Settings that decide what lies between live bytes and what the system sees."""
    from lowtide import accelerator

    found = []
    if accelerator.is_present():
        named = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        found.append(_reserves(named, *_reserved_by_a_step()))
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
