"""What the first step of a restarted run takes, with kept plans and without.

python -m benchmarks restart [--quick]

Each run is a process of its own: the first one that keeps plans, the next one that uses them, and one
without. Processor time of all threads is taken, from the call of the model to the end of backward. A plain
process says what its first step takes beside later ones, before there is any limit: the first use of
PyTorch's kernels and of the allocator is in every first step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import warnings
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cases import gpt, llama3
from benchmarks.common import Case, quick, run_key, save, step_of
from lowtide import limit_memory
from lowtide.run.record.engine import engine

BUDGETS = ("60%", "min")
STEPS = 6


def cases() -> dict[str, Case]:
    """The models."""
    return {one.name: one for one in (gpt(6, 256, batch=4, sequence=256), llama3(layers=6, width=256))}


def child(name: str, budget: str, folder: str) -> None:
    """One process: prints what its steps take."""
    warnings.simplefilter("ignore")
    case = cases()[name]
    model, batch = case.build(), case.batch()
    engine()
    handle = limit_memory(model, budget, plans=folder or None) if budget else None
    step = step_of(model, batch)
    seconds, first_peak = list[float](), 0
    for _ in range(STEPS):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
        if handle is not None:
            first_peak = first_peak or handle.measured_peak_bytes or 0
    later = statistics.median(seconds[2:])
    found: dict[str, Any] = {"first_seconds": seconds[0], "later_seconds": later}
    if handle is not None and handle.budget_bytes:
        found["first_peak_over_budget"] = first_peak / handle.budget_bytes
    print(json.dumps(found))


def run(*given: str) -> dict[str, Any]:
    """What a process found."""
    command = [sys.executable, "-m", "benchmarks.restart", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def row_of(name: str, budget: str, rounds: int) -> dict[str, Any]:
    """One row: medians over ``rounds`` restarts."""
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "without": [], "keeping": [], "restarted": []}
    for _ in range(rounds):
        with TemporaryDirectory() as folder:
            found["plain"].append(run(name, "", ""))
            found["without"].append(run(name, budget, ""))
            found["keeping"].append(run(name, budget, folder))
            found["restarted"].append(run(name, budget, folder))
    row: dict[str, Any] = {"model": name, "run": run_key(), "budget": budget}
    for kind, runs in found.items():
        for figure in runs[0]:
            row[f"{kind}_{figure}"] = statistics.median(one[figure] for one in runs)
    print(
        f"{name} at {budget}: first step {row['without_first_seconds']:.2f} s without kept plans, "
        f"{row['restarted_first_seconds']:.2f} s with, later ones {row['restarted_later_seconds']:.2f} s; "
        f"plain {row['plain_first_seconds']:.2f} and {row['plain_later_seconds']:.2f} s; its peak is "
        f"{row['restarted_first_peak_over_budget']:.4f} of the budget",
        flush=True,
    )
    return row


def main() -> None:
    """Run and write benchmarks/results/restart.json."""
    rows = [row_of(name, budget, 1 if quick() else 3) for name in cases() for budget in BUDGETS]
    save("restart", rows)


if __name__ == "__main__":
    child(*sys.argv[1:])
