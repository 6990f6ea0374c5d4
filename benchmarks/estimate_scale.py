"""What `lowtide simulate` needs for the largest published models, the newcomer's question, and the tables of
docs/estimate.md.

python -m benchmarks estimate_scale
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lowtide.budget import format_bytes
from lowtide.estimate import configure, estimate
from lowtide.estimate.devices import device
from lowtide.estimate.suggest import suggest

DOCS = Path(__file__).parent.parent / "docs" / "estimate.md"
START, END = "<!-- {} -->", "<!-- end of {} -->"
MODELS = {"22b": [0], "175b": [0, 1, 7], "530b": [0, 1, 34], "1t": [0, 1, 63]}
PAPER: dict[str, Any] = dict(sequence_parallel=True, recompute="selective")
ALONE = """
import json, resource, sys, time
from lowtide.estimate import configure
begin = time.perf_counter()
from lowtide.estimate.simulation import simulate
name, stages, settings = json.loads(sys.argv[1])
found = simulate(configure(name, as_published=True, **settings), stages=stages)
rows = [
    {
        "stage": s.timeline.stage,
        "in_flight": s.timeline.in_flight,
        "traced_held_bytes": s.timeline.held_bytes,
        "closed_held_bytes": s.closed.activations_bytes,
        "traced_peak_bytes": s.timeline.activation_peak_bytes,
        "closed_peak_bytes": s.closed.activation_peak_bytes,
        "largest_difference": max(s.rows, key=lambda r: abs(r.difference_bytes)).to_json(),
    }
    for s in found.stages
]
seconds, host_bytes = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "host_bytes": host_bytes, "stages": rows}))
"""


def alone(name: str, stages: list[int]) -> dict[str, Any]:
    """One model simulated in a process of its own: seconds, most resident memory, and what came out."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps([name, stages, PAPER])],
        capture_output=True,
        text=True,
        check=True,
    )
    return {"model": name, **json.loads(done.stdout)}


def newcomer() -> dict[str, Any]:
    """Does Llama-3 8B at 8k tokens fit on 4 x 80 GB, and with what?"""
    begin = time.perf_counter()
    found = suggest(
        "llama3-8b", devices=4, device=device("a100"), memory_bytes=80 * 10**9, seq=8192, runs_with="lowtide"
    )
    return {
        "seconds": time.perf_counter() - begin,
        "fitting": found.fitting,
        "tried": found.tried,
        "suggestions": [one.to_json() for one in found.best],
    }


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        [
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
            *("| " + " | ".join(row) + " |" for row in rows),
        ]
    )


def closed_rows() -> list[dict[str, Any]]:
    """The published models by the closed form: before and after the paper's techniques."""
    found = []
    for name in MODELS:
        row: dict[str, Any] = {"model": name}
        for case, settings in (("baseline", {}), ("both", PAPER)):
            made = estimate(configure(name, as_published=True, **settings))
            row[case] = {
                "layers_bytes": made.stages[0].layer_activations_bytes,
                "total_bytes": made.total_bytes,
            }
        found.append(row)
    return found


def write_docs(data: dict[str, Any]) -> None:
    """Put the tables into docs/estimate.md between their marks."""
    gib = 2**30
    closed = _table(
        [
            "model",
            "activations of stage 0",
            "with sequence parallelism and selective recomputation",
            "whole device before",
            "after",
        ],
        [
            [
                row["model"],
                *(f"{row[case]['layers_bytes'] / gib:.1f} GiB" for case in ("baseline", "both")),
                *(f"{row[case]['total_bytes'] / gib:.1f} GiB" for case in ("baseline", "both")),
            ]
            for row in data["closed"]
        ],
    )
    traced = _table(
        [
            "model",
            "stage",
            "in flight",
            "kept, traced",
            "by formula",
            "kept and temporary, traced",
            "by formula",
            "seconds",
            "host memory",
        ],
        [
            [
                row["model"],
                str(stage["stage"]),
                str(stage["in_flight"]),
                *(
                    f"{stage[key] / gib:.3f} GiB"
                    for key in (
                        "traced_held_bytes",
                        "closed_held_bytes",
                        "traced_peak_bytes",
                        "closed_peak_bytes",
                    )
                ),
                f"{row['seconds']:.0f} in all" if place == 0 else "",
                format_bytes(row["host_bytes"]) if place == 0 else "",
            ]
            for row in data["rows"]
            for place, stage in enumerate(row["stages"])
        ],
    )
    ours = _table(
        [
            "",
            "t",
            "p",
            "d",
            "ZeRO",
            "micro-batch",
            "recompute",
            "optimizer",
            "loss",
            "GiB",
            "predicted s a step",
        ],
        [
            [
                str(place),
                f"{one['tp']}{' sp' if one['sequence_parallel'] else ''}",
                str(one["pp"]) + (f" x{one['interleave']}" if one["interleave"] > 1 else ""),
                *(str(one[key]) for key in ("dp", "zero", "micro_batch", "recompute")),
                "host" if one["offload_optimizer"] else "device",
                one["loss"].replace("auto", "torch" if one["tp"] == 1 else "in-place"),
                f"{one['reserved_bytes'] / gib:.1f}",
                f"{one['seconds']:.0f}",
            ]
            for place, one in enumerate(data["newcomer"]["suggestions"][:5], 1)
        ],
    )
    text = DOCS.read_text()
    for name, table in (("closed", closed), ("traced", traced), ("newcomer", ours)):
        start, end = START.format(name), END.format(name)
        before, rest = text.split(start, 1)
        text = f"{before}{start}\n{table}\n{end}{rest.split(end, 1)[1]}"
    DOCS.write_text(text)


def main() -> None:
    """Write the result file and the tables."""
    from benchmarks.common import save

    rows = [alone(name, stages) for name, stages in MODELS.items()]
    more: dict[str, Any] = {"closed": closed_rows(), "newcomer": newcomer()}
    save("estimate_scale", rows, **more)
    write_docs({"rows": rows, **more})


if __name__ == "__main__":
    main()
