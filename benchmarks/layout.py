"""Static layouts against their lower bound: traced steps of the test models, and hard packings.

python -m benchmarks layout

The packings are made here, since none may be copied: a square of 1024 x 1024 cut into rectangles, so that a layout without a hole exists. The
more cuts in time coincide with earlier ones, the more buffers begin at one moment and the harder the search.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.common import RESULTS, save
from lowtide.plan.layout import check, find
from lowtide.plan.lifetimes import lifetimes

SECONDS = 15.0
PACKING_SECONDS = 60.0
COUNTS = (150, 180, 210, 240, 270, 300, 330, 360, 390, 420, 450)
SHARES = (0.0, 0.4, 0.7)


def _load(path: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def packings(shares: tuple[float, ...] = SHARES) -> list[dict[str, Any]]:
    """Eleven perfect packings for each share of coinciding cuts."""
    cut_square = _load("tests/plan/test_layout.py", "lowtide_layout_cases").cut_square
    rows = []
    for share in shares:
        for number, count in enumerate(COUNTS):
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
            print(f"{rows[-1]['name']}: {rows[-1]['over_bound']:+.2%} of the bound in {found.seconds:.2f} s ({found.source})", flush=True)
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
            print(f"{rows[-1]['name']}: {rows[-1]['over_bound']:+.3%} of the bound in {found.seconds:.2f} s ({found.source})", flush=True)
    return rows


def main(kinds: tuple[str, ...] = ("traces", "packings"), shares: tuple[float, ...] = SHARES) -> None:
    """Run and write benchmarks/results/layout_traces.json and layout_packings.json; packings of other shares that stand there stay."""
    torch.set_num_threads(1)
    if "traces" in kinds:
        save("layout_traces", traces(), seconds=SECONDS)
    if "packings" in kinds:
        before = RESULTS / "layout_packings.json"
        others = [r for r in json.loads(before.read_text())["rows"] if r["share"] not in shares] if before.exists() else []
        rows = packings(shares)
        save("layout_packings", sorted(others + rows, key=lambda r: r["share"]), seconds=PACKING_SECONDS)
        for share in shares:
            mine = [r for r in rows if r["share"] == share]
            median = statistics.median(r["seconds"] for r in mine)
            print(f"{share:.0%} coinciding cuts: {sum(r['holds'] for r in mine)} of {len(mine)} at capacity, median {median:.2f} s")


if __name__ == "__main__":
    main()
