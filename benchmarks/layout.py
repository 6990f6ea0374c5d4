"""Static layouts against their lower bound: traced steps of the test models, and hard packings.

python -m benchmarks layout
LOWTIDE_PACKINGS=path/to/folder python -m benchmarks layout

The packings are made here, since none may be copied: a square of 1024 x 1024 cut into rectangles, so that a
layout without a hole exists. The more cuts in time coincide with earlier ones, the more buffers begin at one
moment and the harder the search.

Published instances are read from the folder that ``LOWTIDE_PACKINGS`` names, where it names one: files such
as ``A.1048576.csv`` with a line of names and then one buffer a line (number, begin, end, size; the capacity
stands in the file's name), the form in which MiniMalloc's eleven come.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

import lowtide
from benchmarks.common import RESULTS, save
from lowtide.extensions.moves.layout import check, find
from lowtide.plan.simulate import Simulator

SECONDS = 15.0
PACKING_SECONDS = 60.0
COUNTS = (150, 180, 210, 240, 270, 300, 330, 360, 390, 420, 450)
SHARES = (0.0, 0.4, 0.7)
FOLDER = "LOWTIDE_PACKINGS"
_FIELDS = {"lower": ("lower", "start"), "upper": ("upper", "end"), "size": ("size",)}


class Lifetimes(NamedTuple):
    """Half-open lifetimes in events of the step.

    Attributes:
        storage: ids of the storages that the step allocates.
        lower, upper: the event that allocates each, and the first event at which it is gone.
        size: bytes.
    """

    storage: list[int]
    lower: list[int]
    upper: list[int]
    size: list[int]


def lifetimes(graph: lowtide.StepGraph, stored: Collection[int] | None = None) -> Lifetimes:
    """The lifetimes of what ``graph`` allocates when the values ``stored`` stay (``None``: all that autograd
    saves, the plain step).

    What replays allocate is not among them: it comes and goes within an unpack.
    """
    sim = Simulator(graph)
    held = sim.simulate(sim.droppable if stored is None else stored).held_until
    found = Lifetimes([], [], [], [])
    for storage in graph.storages:
        if storage.producer is None or not storage.bytes:
            continue
        end = max(sim.natural_end[storage.id], held.get(storage.id, 0))
        found.storage.append(storage.id)
        found.lower.append(sim.op_event[storage.producer])
        found.upper.append(min(end + 1, sim.end) if end < sim.end else sim.end)
        found.size.append(storage.bytes)
    return found


def _load(path: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def packings(shares: tuple[float, ...] = SHARES, counts: tuple[int, ...] = COUNTS) -> list[dict[str, Any]]:
    """A perfect packing for each share of coinciding cuts and each number of buffers."""
    cut_square = _load("tests/plan/test_layout.py", "lowtide_layout_cases").cut_square
    rows = []
    for share in shares:
        for count in counts:
            number = COUNTS.index(count)
            lower, upper, size = cut_square(count, 100 + number, share, 1024)
            found = find(lower, upper, size, capacity=1024, seconds=PACKING_SECONDS)
            assert check(lower, upper, size, found.offsets) == found.height
            rows.append(
                {
                    "kind": "packing",
                    "name": f"{count} buffers, {share:.0%} coinciding cuts",
                    "share": share,
                    "buffers": count,
                    "bound": found.bound,
                    "over_bound": found.height / found.bound - 1,
                    "seconds": found.seconds,
                    "source": found.source,
                    "holds": found.height == found.bound,
                }
            )
            print(
                f"{rows[-1]['name']}: {rows[-1]['over_bound']:+.2%} of the bound in {found.seconds:.2f} s "
                f"({found.source})",
                flush=True,
            )
    return rows


def read(path: Path) -> tuple[list[int], list[int], list[int], int]:
    """Begins, ends and sizes of a file's buffers, and the capacity in its name."""
    try:
        capacity = int(path.stem.rpartition(".")[2])
    except ValueError as error:
        raise SystemExit(
            f"{path}: the capacity has to stand in the file's name, as in A.1048576.csv"
        ) from error
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = []
    for field, names in _FIELDS.items():
        name = next((name for name in names if rows and name in rows[0]), None)
        if name is None:
            raise SystemExit(f"{path}: no buffers with a column {' or '.join(names)} ({field})")
        columns.append([int(row[name]) for row in rows])
    return columns[0], columns[1], columns[2], capacity


def published(folder: Path) -> list[dict[str, Any]]:
    """The instances in a folder: whether each is laid out within its capacity."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise SystemExit(f"{FOLDER}={folder}: there are no CSV files")
    rows = []
    for path in paths:
        lower, upper, size, capacity = read(path)
        found = find(lower, upper, size, capacity=capacity, seconds=PACKING_SECONDS)
        assert check(lower, upper, size, found.offsets) == found.height
        rows.append(
            {
                "kind": "published",
                "name": path.name.partition(".")[0],
                "buffers": len(size),
                "bound_share": found.bound / capacity,
                "over_capacity": max(0.0, found.height / capacity - 1),
                "seconds": found.seconds,
                "source": found.source,
                "holds": found.height <= capacity,
            }
        )
        print(
            f"{rows[-1]['name']}: {found.height / capacity:.2%} of the capacity in {found.seconds:.2f} s "
            f"({found.source})",
            flush=True,
        )
    return rows


def traces() -> list[dict[str, Any]]:
    """The plain step and the step of least memory of every family of the tests."""
    zoo = _load("tests/families/zoo.py", "lowtide_layout_zoo")
    rows = []
    for family in zoo.FAMILIES:
        torch.manual_seed(0)
        model, batch = family.build()
        handle = lowtide.limit_memory(model.train(), policy="keep_all")
        handle.prepare(**batch)
        graph = handle.graph
        assert graph is not None
        handle.remove()
        for policy, stored in (("plain", None), ("full", lowtide.plan(graph, policy="full").stored)):
            _, lower, upper, size = lifetimes(graph, stored)
            begin = time.perf_counter()
            found = find(lower, upper, size, seconds=SECONDS)
            assert check(lower, upper, size, found.offsets) == found.height
            rows.append(
                {
                    "kind": "trace",
                    "name": f"{family.name}, {policy}",
                    "buffers": len(size),
                    "bound": found.bound,
                    "over_bound": found.height / found.bound - 1,
                    "seconds": time.perf_counter() - begin,
                    "source": found.source,
                    "holds": found.height <= 1.005 * found.bound,
                }
            )
            print(
                f"{rows[-1]['name']}: {rows[-1]['over_bound']:+.3%} of the bound in {found.seconds:.2f} s "
                f"({found.source})",
                flush=True,
            )
    return rows


def main(
    kinds: tuple[str, ...] = ("traces", "packings", "public"),
    shares: tuple[float, ...] = SHARES,
    counts: tuple[int, ...] = COUNTS,
) -> None:
    """Run and write layout_traces.json, layout_packings.json and layout_public.json in benchmarks/results;
    other packings that stand there stay.
    """
    torch.set_num_threads(1)
    if "traces" in kinds:
        save("layout_traces", traces(), seconds=SECONDS)
    if "public" in kinds and os.environ.get(FOLDER):
        rows = published(Path(os.environ[FOLDER]))
        save("layout_public", rows, seconds=PACKING_SECONDS)
        print(f"published: {sum(r['holds'] for r in rows)} of {len(rows)} at capacity")
    if "packings" in kinds:
        before = RESULTS / "layout_packings.json"
        rows = packings(shares, counts)
        done = {r["name"] for r in rows}
        others = (
            [r for r in json.loads(before.read_text())["rows"] if r["name"] not in done]
            if before.exists()
            else []
        )
        save(
            "layout_packings",
            sorted(others + rows, key=lambda r: (r["share"], r["buffers"])),
            seconds=PACKING_SECONDS,
        )
        for share in shares:
            mine = [r for r in rows if r["share"] == share]
            median = statistics.median(r["seconds"] for r in mine)
            print(
                f"{share:.0%} coinciding cuts: {sum(r['holds'] for r in mine)} of {len(mine)} at capacity, "
                f"median {median:.2f} s"
            )


if __name__ == "__main__":
    main()
