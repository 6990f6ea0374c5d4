"""Whether the first step of fifty models keeps a budget in bytes.

python -m benchmarks held_families [--name NAME ...] [--share 60] [--out NAME]

Every family of the tests in float32 and under autocast to bfloat16, and six models of
`benchmarks.sharded_models`, not shared. The budget is a share of the plain first step's peak. A meter beside
the limit reads the peaks of the first three steps, whether or not they end in an error. A model whose refusal
names a smallest budget trains once more within 1.1 times that.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from benchmarks import sharded_models
from benchmarks.common import RESULTS, keep_pages, run_key, save
from benchmarks.held import ROOM_ABOVE_MIN, digest_of, kinds_of_warnings, tensors_in, watched
from benchmarks.tables import mib, page_with_warnings, yes
from lowtide import meter

STEPS = 3
OTHERS = tuple(name for name in sharded_models.FAMILIES if name not in ("bf16 policy", "tied embeddings"))
_ZOO = Path(__file__).parents[1] / "tests" / "families" / "zoo.py"


@dataclass
class Case:
    """A model and how it is trained.

    Attributes:
        build: makes the model and the keyword arguments of its forward, or its only argument.
        around: what the forward runs within.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Any]]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def cases() -> list[Case]:
    """All fifty."""
    spec = importlib.util.spec_from_file_location("lowtide_held_zoo", _ZOO)
    assert spec is not None and spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = zoo  # its dataclass looks there
    spec.loader.exec_module(zoo)
    half = partial(torch.autocast, "cpu", torch.bfloat16)
    found = [Case(family.name, family.build) for family in zoo.FAMILIES]
    found += [Case(f"{family.name}, bf16", family.build, half) for family in zoo.FAMILIES]
    return found + [Case(name, partial(other, name)) for name in OTHERS]


def other(name: str) -> tuple[nn.Module, Tensor]:
    """A model of `benchmarks.sharded_models` that is not shared."""
    return sharded_models.FAMILIES[name](), sharded_models.batch(name, 0)


@dataclass
class Seen:
    """What some steps did: peaks with what was resident, seconds, digests, warnings, and what ended them."""

    peaks: list[int]
    seconds: list[float]
    digests: list[bytes]
    reported: list[int | None]
    warned: list[tuple[int, str]]
    error: Exception | None = None


def train(case: Case, budget: int | None = None) -> Seen:
    """Train for a few steps."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # some say what they lack
        model, batch = case.build()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = None if budget is None else lowtide.limit_memory(model, budget, progress=False)
    seen = Seen([], [], [], [], [])
    given = list(batch.values()) if isinstance(batch, dict) else [batch]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", lowtide.LowtideWarning)
        for number in range(STEPS):
            torch.manual_seed(100 + number)
            gc.collect()
            resident = meter.resident_bytes(model)
            resident += sum(storage.nbytes() for storage in meter.storages(tensors_in(given)))
            loss: Any = torch.zeros(())
            with meter.peak() as peak:
                begin = time.thread_time()
                try:
                    loss = one_step(case, model, batch)
                except Exception as error:
                    seen.error = error.with_traceback(None)
                seen.seconds.append(time.thread_time() - begin)
            seen.peaks.append(resident + peak.peak_bytes)
            seen.warned += [(number, str(one.message)) for one in caught]
            caught.clear()
            if seen.error is not None:
                break
            seen.reported.append(handle.measured_peak_bytes if handle is not None else None)
            seen.digests.append(digest_of([loss, *(one.grad for one in model.parameters())]))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    if handle is not None:
        handle.remove()
    return seen


def one_step(case: Case, model: nn.Module, batch: Any) -> Tensor:
    """One forward and backward; the loss."""
    with case.around():
        found = model(**batch) if isinstance(batch, dict) else model(batch)
        loss: Tensor = found if isinstance(found, Tensor) else found.loss
    loss.backward()
    return loss.detach()


def row_of(case: Case, share: int) -> dict[str, Any]:
    """The row of one model; what goes wrong becomes its text."""
    row: dict[str, Any] = {"name": case.name, "share": share, "run": run_key()}
    try:
        plain = train(case)
        if plain.error is not None:
            raise plain.error
        budget = int(share / 100 * plain.peaks[0])
        row |= {"plain_peak_bytes": plain.peaks[0], "budget_bytes": budget}
        seen = train(case, budget)
        if isinstance(seen.error, lowtide.BudgetError) and seen.error.smallest_bytes:
            row["refused"] = {
                "budget_bytes": budget,
                "smallest_bytes": seen.error.smallest_bytes,
                "first_over_budget": round(seen.peaks[0] / budget, 4),
                "step": len(seen.peaks) - 1,
                "error": str(seen.error),
            }
            budget = row["budget_bytes"] = int(ROOM_ABOVE_MIN * seen.error.smallest_bytes)
            seen = train(case, budget)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"}
    return row | compared(plain, seen, budget)


def compared(plain: Seen, seen: Seen, budget: int) -> dict[str, Any]:
    """What a row says of its steps."""
    off = [a - b for a, b in zip(seen.reported, seen.peaks, strict=False) if a is not None]
    row: dict[str, Any] = {
        "over_budget": [round(peak / budget, 4) for peak in seen.peaks],
        "reported_furthest_bytes": max(off, key=abs, default=None),
        "same_bits": plain.digests[: len(seen.digests)] == seen.digests,
        "warnings": kinds_of_warnings(seen.warned),
        "first_time_ratio": round(seen.seconds[0] / plain.seconds[0], 2),
        "time_ratio": round(seen.seconds[-1] / plain.seconds[-1], 2),
    }
    if seen.error is not None:
        row["error"] = f"{type(seen.error).__name__}: {seen.error}"
    return row


def holds(row: dict[str, Any]) -> bool:
    """Whether the first step kept its budget, with the bits of the plain one."""
    return "error" not in row and row["over_budget"][0] <= 1 and row["same_bits"]


HEAD = (
    "model",
    "plain MiB",
    "budget MiB",
    "of plain",
    "refused",
    "first",
    "later",
    "same bits",
    "reported off KiB",
    "warnings",
)
HEAD += ("first time", "holds")


def cells_of(row: dict[str, Any]) -> list[str]:
    """A row as people read it."""
    cells = [row["name"]]
    if "over_budget" in row:
        first, *later = row["over_budget"]
        off = row["reported_furthest_bytes"]
        cells += [mib(row["plain_peak_bytes"]), mib(row["budget_bytes"])]
        cells += [f"{row['budget_bytes'] / row['plain_peak_bytes']:.2f}"]
        cells += [f"{row['share']} %" if "refused" in row else "", f"{first:.3f}"]
        cells += [f"{max(later):.3f}" if later else "", yes(row["same_bits"])]
        cells += ["none" if off is None else f"{off / 1024:+,.0f}", str(len(row["warnings"]))]
        cells += [f"{row['first_time_ratio']:.1f}"]
    cells += [""] * (len(HEAD) - 1 - len(cells))
    error = re.sub(r"\s+", " ", row.get("error", "")).split(" What to do")[0][:110].replace("|", "/")
    return [*cells, f"**{error}**" if error else yes(holds(row))]


ABOUT = (
    "Made by `python -m benchmarks held_families`. *First* and *later*: the peak of the first step, and "
    "the largest of the next two, over the budget, read by a meter beside the limit. Models that "
    "*refused* the share have 1.1 times the smallest budget that the refusal named. *Reported off*: the "
    "furthest from the meter's peak that the handle reports. *First time*: of the first step over the "
    "plain one."
)


def page(found: dict[str, Any]) -> str:
    """The rows as a page."""
    title = "The first step within a budget in bytes"
    return page_with_warnings(title, ABOUT, list(HEAD), found, cells_of, itemgetter("name"))


def main(arguments: Sequence[str] = ()) -> int:
    """Run, and write benchmarks/results/held_families.json and .md."""
    parser = argparse.ArgumentParser("python -m benchmarks held_families")
    parser.add_argument("--name", nargs="+", help="of the models; all without")
    parser.add_argument("--share", type=int, default=60, help="of the plain peak, in percent")
    parser.add_argument("--out", default="held_families", help="the name of the result file")
    asked = parser.parse_args(arguments)
    from transformers.utils import logging

    logging.set_verbosity_error()
    keep_pages()
    rows = []
    for case in cases():
        if asked.name and case.name not in asked.name:
            continue
        with watched():
            rows.append(row_of(case, asked.share))
        print(" | ".join(cells_of(rows[-1])), flush=True)
    save(asked.out, rows)
    path = RESULTS / f"{asked.out}.json"
    path.with_suffix(".md").write_text(page(json.loads(path.read_text())))
    good = sum(map(holds, rows))
    refused = sum("refused" in row for row in rows)
    print(
        f"{good} of {len(rows)} first steps are within the budget, with the bits of the plain step; "
        f"{refused} models refused {asked.share} % and had 1.1 times the smallest that they named"
    )
    return 0 if good == len(rows) else 1
