"""Every differentiable operation of PyTorch's operator database with everything evicted, in every variant,
and the report of it.

    python -m benchmarks op_sweep                    # everything; writes benchmarks/results/op_sweep.json and
    .md python -m benchmarks.op_sweep --only softmax     # operations whose name contains the text; writes
    nothing

What is done with each is told at the top of `op_check.py`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import RESULTS
from benchmarks.op_check import (
    ABOUT,
    SECONDS_PER_SAMPLE,
    VARIANTS,
    Outcome,
    Status,
    Variant,
    check_operation,
    full_name,
    operations,
)

EXTRA_SAMPLES = 12


def sweep(only: str = "", variants: tuple[Variant, ...] = VARIANTS, quiet: bool = False) -> list[Outcome]:
    """Every operation in every variant."""
    found: list[Outcome] = []
    ops = operations(only)
    for variant in variants:
        limit = None if variant == "float" else EXTRA_SAMPLES
        for place, op in enumerate(ops):
            outcome = check_operation(op, variant, limit)
            if outcome is None:
                continue
            found.append(outcome)
            if outcome.wrong and not quiet:
                print(f"{variant} {outcome.name}: {dict(outcome.counts)} {outcome.notes}", flush=True)
            if place % 50 == 0:
                gc.collect()
                if not quiet:
                    print(f"-- {variant} {place}/{len(ops)}", flush=True)
    return found


def total(outcomes: list[Outcome]) -> dict[str, Any]:
    """Counts over operations and samples."""
    ran = [o for o in outcomes if o.counts["bitwise"] or o.wrong]
    droppable, dropped = sum(o.droppable_bytes for o in ran), sum(o.dropped_bytes for o in ran)
    counts: Counter[Status] = Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
    return {
        "operations": len(outcomes),
        "operations_compared": len(ran),
        "operations_bitwise": sum(not o.wrong for o in ran),
        "operations_nothing_kept": sum(not o.wrong and not o.kept for o in ran),
        "operations_keeping_results": sum(bool(o.kept) for o in ran),
        "operations_without_comparison": len(outcomes) - len(ran),
        "samples": sum(counts.values()),
        "samples_by_status": dict(sorted(counts.items())),
        "droppable_bytes": droppable,
        "dropped_bytes": dropped,
        "dropped_percent": math.floor(1e4 * dropped / droppable) / 100 if droppable else 100.0,
    }


def report(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """Everything as plain data."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread used"
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": round(seconds),
        "variants": {
            v: {"about": ABOUT[v], **total([o for o in outcomes if o.variant == v])} for v in VARIANTS
        },
        "all": total(outcomes),
        "not_on_a_cpu": sorted({full_name(op) for op in operations()} - {o.name for o in outcomes}),
        "operations": [
            {
                "name": o.name,
                "variant": o.variant,
                "samples": dict(sorted(o.counts.items())),
                "droppable_bytes": o.droppable_bytes,
                "dropped_bytes": o.dropped_bytes,
                **({"kept": o.kept} if o.kept else {}),
                **({"stayed_bytes_by_writer": dict(o.still.most_common())} if o.still else {}),
                **({"notes": o.notes} if o.notes else {}),
            }
            for o in outcomes
        ],
    }


def markdown(data: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        "# Every differentiable operation, everything evicted",
        "",
        f"PyTorch's operator database (`op_db`), {data['date']}, torch {data['versions']['torch']}, Python "
        f"{data['versions']['python']}, {data['machine']}, {data['seconds']} s. Made by `python -m "
        "benchmarks op_sweep`; what is done with each stands at the top of `benchmarks/op_check.py`.",
        "",
        "| inputs | operations | bitwise | keep a result | samples | bitwise samples | droppable bytes | "
        "dropped |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in [*data["variants"].items(), ("**all**", data["all"])]:
        statuses = row["samples_by_status"]
        lines.append(
            f"| {name} | {row['operations_compared']} | {row['operations_bitwise']} | "
            f"{row['operations_keeping_results']} | {row['samples']} | {statuses.get('bitwise', 0)} | "
            f"{row['droppable_bytes']:,} | {row['dropped_percent']:.2f} % |"
        )
    lines += [
        "",
        *(
            f"- **{name}**: "
            f"{text}{'' if name == 'float' else f'; the first {EXTRA_SAMPLES} samples of each'}."
            for name, text in ABOUT.items()
        ),
    ]
    rows = data["operations"]

    def section(title: str, about: str, found: list[str]) -> None:
        lines.extend(["", f"## {title} ({len(found)})", "", about, "", *(found or ["None."])])

    wrong = [r for r in rows if r["samples"].get("different") or r["samples"].get("error")]
    section(
        "Not bitwise",
        "Samples whose outputs or gradients differ from plain, or that raise where plain does not.",
        [f"- `{r['name']}` ({r['variant']}): {r['samples']}: {'; '.join(r.get('notes', []))}" for r in wrong],
    )
    section(
        "Results kept because an operation did not reproduce",
        "Found and named at run time by running every operation twice; gradients are bitwise equal all the "
        "same.",
        [
            f"- `{r['name']}` ({r['variant']}): {'; '.join(f'`{n}`: {why}' for n, why in r['kept'].items())}"
            for r in rows
            if r.get("kept")
        ],
    )
    stayed = sorted(
        (r for r in rows if r["droppable_bytes"] > r["dropped_bytes"]),
        key=lambda r: r["dropped_bytes"] - r["droppable_bytes"],
    )
    section(
        "Saved bytes that stayed",
        "Operations with saved storages that were still there before backward, and what wrote them.",
        [
            f"- `{r['name']}` ({r['variant']}): {r['droppable_bytes'] - r['dropped_bytes']:,} of "
            f"{r['droppable_bytes']:,} bytes, "
            + ", ".join(f"`{n}` {b:,}" for n, b in r["stayed_bytes_by_writer"].items())
            for r in stayed
        ],
    )
    for status, title, about in (
        (
            "plain differs",
            "Plain disagrees with itself",
            "Plain runs with one seed differ, so there is nothing to compare with.",
        ),
        (
            "plain raises",
            "Plain raises",
            "The plain run of some samples raises (what a variant feeds is not always allowed).",
        ),
        ("too slow", "Too slow", f"Some samples take over {SECONDS_PER_SAMPLE} s."),
    ):
        section(
            title,
            about,
            [
                f"- `{r['name']}` ({r['variant']}): {r['samples'][status]} samples: "
                f"{'; '.join(r.get('notes', []))}"
                for r in rows
                if r["samples"].get(status)
            ],
        )
    section(
        "Not on a CPU",
        "Operations that have no floating-point samples here, so that nothing could be compared.",
        [f"- `{name}`" for name in data["not_on_a_cpu"]],
    )
    return "\n".join(lines) + "\n"


def as_text(data: dict[str, Any]) -> str:
    """JSON with one line for each operation."""
    rows = ",\n  ".join(json.dumps(row) for row in data["operations"])
    head = json.dumps({**data, "operations": []}, indent=1)
    return head.removesuffix("[]\n}") + "[\n  " + rows + "\n ]\n}\n"


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="operations whose name contains this; results are not written"
    )
    parser.add_argument(
        "--variant", choices=VARIANTS, action="append", help="these variants only; results are not written"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begun = time.monotonic()
    outcomes = sweep(options.only, tuple(options.variant or VARIANTS))
    data = report(outcomes, time.monotonic() - begun)
    if options.only or options.variant:
        print(markdown(data))
    else:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "op_sweep.json").write_text(as_text(data))
        (RESULTS / "op_sweep.md").write_text(markdown(data))
        print(json.dumps(data["all"], indent=1))
    return 1 if any(o.wrong for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
