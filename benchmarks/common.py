"""What every benchmark shares: models to measure, paired timing, and results that say where they come
from.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import hashlib
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch

import lowtide
from lowtide import __version__, meter

QUICK = "--quick"
"""An argument of ``python -m benchmarks``: fewer rounds, for benchmarks that take minutes then."""

RESUME = "--resume"
"""Another: go on with a run that was stopped, where neither lowtide nor the machine has changed since."""

RESULTS = Path(__file__).parent / "results"

UNSETTLED = 13
"""The first steps under a plan, of which one is verified, one listened to and nine are timed, all of which
takes longer: they are not measured.
"""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of glibc's mallopt
_LARGEST_INT = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """A model and one batch.

    Attributes:
        name: what the tables call it.
        build: makes the model.
        batch: makes the keyword arguments of its forward; the output has ``.loss``.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    batch: Callable[[], dict[str, Any]]


def quick() -> bool:
    """Whether few rounds are asked for."""
    return QUICK in sys.argv


def machine() -> dict[str, Any]:
    """The machine as far as it matters for a figure."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "lowtide": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **({"quick": True} if quick() else {}),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


@cache
def run_key() -> str:
    """A digest of what a row comes from: the package, the benchmarks' models and clocks, and the machine."""
    package = Path(lowtide.__file__).parent
    files = sorted(path for ending in ("*.py", "*.cpp") for path in package.rglob(ending))
    here = [Path(__file__).with_name(name) for name in ("cases.py", "common.py")]
    found = hashlib.sha256(json.dumps({**machine(), "date": ""}).encode())
    for path in (*files, *here):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def kept_rows(name: str) -> list[dict[str, Any]]:
    """The rows that a stopped run of a benchmark wrote, where ``--resume`` asks to go on with it; each says
    as ``run`` its `run_key`, and rows of another one are none.
    """
    path = RESULTS / f"{name}.json"
    if RESUME not in sys.argv or not path.exists():
        return []
    return [row for row in json.loads(path.read_text())["rows"] if row.get("run") == run_key()]


def step_of(model: torch.nn.Module, batch: dict[str, Any]) -> Callable[[], None]:
    """One forward and backward from cleared gradients; the caller lets go of everything but the gradients."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return step


def unlimited_step_of(model: torch.nn.Module, batch: dict[str, Any]) -> Callable[[], None]:
    """The same step of a limited model without its limit: two models of one kind differ by several percent
    here, from where their memory lies.
    """
    step = step_of(model, batch)

    def unlimited() -> None:
        limit = model.__dict__.pop("forward", None)
        try:
            step()
        finally:
            if limit is not None:
                model.__dict__["forward"] = limit

    return unlimited


def keep_pages() -> bool:
    """Have the C library keep freed memory for the next step instead of giving its pages back; whether it
    can.

    By default glibc returns large blocks to the system when they are freed, and a step that allocates more
    pays for more of them again, page by page: here up to a fifth of a plain step, most of which a planned
    step saves. What a plan costs is better seen without.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mapped = mallopt(_MMAP_THRESHOLD, _LARGEST_INT) or mallopt(_MMAP_MAX, 0)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, _LARGEST_INT))


def stay_on_one_processor() -> None:
    """Keep a process whose PyTorch has one thread from moving between processors: caches stay warm."""
    if hasattr(os, "sched_setaffinity") and torch.get_num_threads() == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def total_peak(model: torch.nn.Module, batch: dict[str, Any], step: Callable[[], object]) -> int:
    """Measured peak of a step in bytes: what is resident before it and what it adds at most."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    inputs = sum(s.nbytes() for s in meter.storages(t for t in batch.values() if isinstance(t, torch.Tensor)))
    # of a limited model whose values move
    slab = getattr(getattr(model.__dict__.get("forward"), "stores", None), "slab", None)
    resident = meter.resident_bytes(model) + inputs + (slab.memory.nbytes if slab is not None else 0)
    return resident + meter.measure(step, timeline=False).peak_bytes


def paired(
    steps: Sequence[Callable[[], None]],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds of each step in each round; the steps of a round run one after the other, in an order that is
    drawn anew for each.

    A step that follows one with a smaller peak pays for pages that the allocator has given back meanwhile, so
    no step may always have the same one before it.
    """
    for _ in range(warmup):
        for step in steps:
            step()
    seconds: list[list[float]] = [[] for _ in steps]
    draw = random.Random(0)
    order = list(range(len(steps)))
    for _ in range(rounds):
        draw.shuffle(order)
        for which in order:
            begin = clock()
            steps[which]()
            seconds[which].append(clock() - begin)
    return seconds


def rounds_within(
    steps: Sequence[Callable[[], None]], seconds: float, least: int = 11, most: int = 41
) -> int:
    """How many rounds of these steps fit in so many seconds, by one warm round."""
    begin = time.perf_counter()
    for step in steps:
        step()
    return min(most, max(least, int(seconds / (time.perf_counter() - begin))))


def median_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Median over the rounds of a - b."""
    return statistics.median(x - y for x, y in zip(a, b, strict=True))


def tiers_of(handle: lowtide.Handle) -> list[Any]:
    """The tiers that a limit has opened."""
    moves: list[Any] = [one for one in handle.extensions if one.name == "moves"]
    return [tier for one in moves for tier in one.stores.tiers.values()]


def save(name: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    """Write a result file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **more, "rows": rows}, indent=1) + "\n")
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
    return path


def twins(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """Copies of a model, itself first."""
    return [model, *(copy.deepcopy(model) for _ in range(count - 1))]
