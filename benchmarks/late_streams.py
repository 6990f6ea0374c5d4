"""Limits, tiers and the host optimizer on two devices in main memory whose streams run late and out of order,
by a seed (`tests/late`): the interleavings that ran, and for every wait and every recorded event the first
seed that fails without it.

    python -m benchmarks late_streams                    # six seconds a scenario
    python -m benchmarks late_streams --quick            # one
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "late"))

from benchmarks.common import QUICK, RESULTS, machine

FOUND = (
    (
        "streams_of_the_user",
        "`record_stream` counted as a write: what it was called on was never recomputed nor offloaded",
        "it is shown to nobody (`interception.py`)",
    ),
    (
        "without `CudaLink.settle`'s order",
        "no seed failed: the device waited a second time for what the program had waited for",
        "the wait and its event are gone (`optim/link.py`)",
    ),
    (
        "without the wait of `GradientStream.add` on a direct link",
        "nothing is under way on a direct link: it waited for nothing",
        "the wait is gone (`optim/stream.py`)",
    ),
    (
        "three_streams_of_the_user",
        "a replay on the third stream read memory of the first that was handed out again: its source was let "
        "go of with the last saved tensor",
        "the allocator is told of the stream (`run/record/values.py`)",
    ),
    (
        "second_device",
        "memory was page-locked with the first device current, by threads too, which sets up CUDA there",
        "it is asked for with the model's device current (`accelerator.py`)",
    ),
)
"""(What showed it, what it was, what was done), of all runs so far."""


def measured(seconds: float) -> dict[str, Any]:
    """Run everything."""
    from late_client import Late, scenario_names  # pyright: ignore[reportMissingImports]
    from late_sites import ELSEWHERE, FAILS  # pyright: ignore[reportMissingImports]

    late, scenarios, sites = Late(), [], []
    for name in scenario_names():
        begin = time.monotonic()
        found = late.ask(name, 0, 1 << 40, seconds=seconds)
        taken = round(time.monotonic() - begin, 1)
        scenarios.append({"scenario": name, "seconds": taken, **found})
        print(
            f"{name}: {found['ran']} seeds, {found['orders']} interleavings {found['wrong']}", file=sys.stderr
        )
    for site, name in FAILS.items():
        found = late.ask(name, 0, 60, without=site)
        sites.append({"site": site, "scenario": name, "seed": found["seed"], "fault": found["wrong"]})
    late.close()
    return {"scenarios": scenarios, "sites": sites, "elsewhere": ELSEWHERE}


def markdown(data: dict[str, Any]) -> str:
    """The results as a page."""
    rows = data["scenarios"]
    total = {key: sum(row[key] for row in rows) for key in ("ran", "orders", "jobs")}
    lines = [
        "# Streams that run late",
        "",
        f"{data['machine']['date']}, torch {data['machine']['torch']}, {data['machine']['processor']}. Made "
        "by `python -m benchmarks late_streams`. Two devices on main memory, whose streams run late and out "
        "of order by a seed (`tests/late/late_device.cpp`), in the place of CUDA. An interleaving is an "
        "order in which the streams' work ran.",
        "",
        "| scenario | seeds | interleavings | pieces of work | faults |",
        "|---|--:|--:|--:|---|",
    ]
    lines += [
        f"| {row['scenario']} | {row['ran']:,} | {row['orders']:,} | {row['jobs']:,} | "
        f"{row['wrong'] or 'none'} |"
        for row in rows
    ]
    lines.append(f"| **all** | {total['ran']:,} | {total['orders']:,} | {total['jobs']:,} | |")
    lines += ["", "## Found and mended", "", "| shown by | what it was | mended |", "|---|---|---|"]
    lines += [f"| {shown} | {what} | {done} |" for shown, what, done in FOUND]
    lines += [
        "",
        "## Without one wait or event",
        "",
        "Each is taken away from the product, and the scenario runs until a seed fails.",
        "",
        "| taken away | scenario | fails at seed | what it shows |",
        "|---|---|--:|---|",
    ]
    lines += [
        f"| `{row['site']}` | {row['scenario']} | {row['seed']} | {row['fault'].split(';')[0]} |"
        for row in data["sites"]
    ]
    lines += ["", "Not shown here:", ""]
    lines += [f"- `{site}`: {why}." for site, why in data["elsewhere"].items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    data = {"machine": machine(), **measured(1 if QUICK in sys.argv else 6)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "late_streams.json").write_text(json.dumps(data, indent=1) + "\n")
    (RESULTS / "late_streams.md").write_text(markdown(data))
    return int(
        any(row["wrong"] for row in data["scenarios"]) or not all(row["fault"] for row in data["sites"])
    )


if __name__ == "__main__":
    sys.exit(main())
