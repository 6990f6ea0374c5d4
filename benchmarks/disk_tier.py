"""A step whose plain peak is at least 2 GiB in half of it: by the disk tier, by recomputing, and by the mix
that the planner picks, in turn.

python -m benchmarks disk_tier

On a machine without a GPU main memory is the device and the disk is the next tier. The bytes written and read
are counted by the tier and held against the plan's; the file does not lie in memory (the tier
refuses that), and reads and writes go past the page cache. The C library is told to keep its pages
(`benchmarks.common.keep_pages`), without which a plain step spends more time on getting them back than a
planned one.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import lowtide
from benchmarks.cases import gpt
from benchmarks.common import (
    keep_pages,
    median_difference,
    paired,
    save,
    step_of,
    tiers_of,
    total_peak,
    twins,
)
from lowtide import policies
from lowtide.plan.data import form_and_tier

ROUNDS = 5


def main() -> None:
    """Run and write benchmarks/results/disk_tier.json."""
    pages = keep_pages()
    case = gpt(8, 64, batch=144, sequence=512)
    torch.manual_seed(0)
    batch = case.batch()
    models = twins(case.build().train(), 4)
    steps = [step_of(model, batch) for model in models]
    plain_peak = total_peak(models[0], batch, steps[0])
    budget = plain_peak // 2
    links = lowtide.measure_links("disk", "auto")
    link = links["disk"]
    print(f"plain peak {plain_peak / 2**30:.2f} GiB, budget {budget / 2**30:.2f} GiB, {link}", flush=True)
    policies_of: dict[str, Any] = {
        "disk": policies.offload("disk", links=links),
        "recompute": "optimal",
        "mixed": policies.mixed("disk", links=links),
    }
    handles: list[lowtide.Handle | None] = [None]
    for policy, model, step in zip(policies_of.values(), models[1:], steps[1:], strict=True):
        handle = lowtide.limit_memory(model, budget=budget, policy=policy)
        handles.append(handle)
        for _ in range(3):
            step()
    before = [_traffic(handle) for handle in handles]
    peaks = [total_peak(model, batch, step) for model, step in zip(models, steps, strict=True)]
    traffic = [
        tuple(b - a for a, b in zip(old, _traffic(handle), strict=True))
        for old, handle in zip(before, handles, strict=True)
    ]
    seconds = paired(steps, ROUNDS)
    base = statistics.median(seconds[0])
    reference = [p.grad for p in models[0].parameters() if p.grad is not None]
    rows = []
    for k, name in enumerate(("plain", *policies_of)):
        handle = handles[k]
        latest = handle._limiter.book.latest if handle is not None else None
        # as predicted before any step, not at the pace of those that ran
        plan = latest.plan if latest is not None else None
        moved = (
            sum(m.encoded_bytes for m in plan.moves if form_and_tier(m.decision)[1] is not None)
            if plan is not None
            else 0
        )
        gradients = [p.grad for p in models[k].parameters() if p.grad is not None]
        extra = median_difference(seconds[k], seconds[0])
        row = {
            "contender": name,
            "peak_bytes": peaks[k],
            "budget_bytes": budget,
            "predicted_peak_bytes": plan.predicted_peak_bytes if plan is not None else peaks[k],
            "seconds": statistics.median(seconds[k]),
            "extra": extra / base,
            "predicted_extra": plan.predicted_extra_seconds / base if plan is not None else 0.0,
            "bound": plan.bound_extra_seconds / base if plan is not None else 0.0,
            "prediction_error": (base + plan.predicted_extra_seconds) / (base + extra) - 1
            if plan is not None
            else 0.0,
            "planned_transfer_bytes": moved,
            "written_bytes": traffic[k][0],
            "read_bytes": traffic[k][1],
            "replayed": len(plan.replayed) if plan is not None else 0,
            "moves": len(plan.moves) if plan is not None else 0,
            "same_gradients": all(torch.equal(a, b) for a, b in zip(reference, gradients, strict=True)),
            "rounds": ROUNDS,
            "notes": list(plan.notes) if plan is not None else [],
        }
        fits = (
            row["peak_bytes"] <= budget
            and traffic[k] == (moved, moved)
            and abs(row["prediction_error"]) <= 0.15
        )
        row["holds"] = row["same_gradients"] and (fits or name == "plain")
        rows.append(row)
        print(row, flush=True)
    speeds = {
        "write_bytes_per_second": link.write_bytes_per_second,
        "read_bytes_per_second": link.read_bytes_per_second,
    }
    save("disk_tier", rows, link=speeds, pages_kept=pages)


def _traffic(handle: lowtide.Handle | None) -> tuple[int, int]:
    """Bytes that the tiers of a limited model have written and read so far."""
    tiers = tiers_of(handle) if handle is not None else []
    return sum(t.counts.written_bytes for t in tiers), sum(t.counts.read_bytes for t in tiers)


if __name__ == "__main__":
    main()
