"""A step whose plain peak is at least 2 GiB in half of it: by the disk tier, by recomputing, and by the mix that the planner picks.

python -m benchmarks disk_tier

On a machine without a GPU main memory is the device and the disk is the next tier. The bytes written and read are counted by the tier and held
against the plan's; the file does not lie in memory (`lowtide.store.disk` refuses that), and reads and writes go past the page cache.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

import lowtide
from benchmarks.cases import gpt
from benchmarks.common import machine, save, step_of, total_peak
from lowtide import policies
from lowtide.plan.plan import stages

ROUNDS = 2


def main() -> None:
    """Run and write benchmarks/results/disk_tier.json."""
    case = gpt(8, 64, batch=144, sequence=512)
    torch.manual_seed(0)
    model, batch = case.build().train(), case.batch()
    step = step_of(model, batch)
    plain_peak = total_peak(model, batch, step)
    budget = plain_peak // 2
    links = lowtide.measure_links("disk", "auto")
    link = links["disk"]
    print(f"plain peak {plain_peak / 2**30:.2f} GiB, budget {budget / 2**30:.2f} GiB, {link}", flush=True)
    contenders: dict[str, Any] = {
        "plain": None,
        "disk": policies.offload("disk", links=links),
        "recompute": "optimal",
        "mixed": policies.mixed("disk", links=links),
    }
    rows = []
    costs: lowtide.Handle | None = None
    reference: list[torch.Tensor] | None = None
    for name, policy in contenders.items():
        handle = None
        if policy is not None:
            handle = lowtide.limit_memory(model, budget=budget, policy=policy)
            if costs is not None:
                handle.share_costs(costs)
            costs = handle
        step()
        step()
        peak = total_peak(model, batch, step)
        tiers = list(handle._limiter.stores.tiers.values()) if handle is not None else []
        before = [(t.counts.written_bytes, t.counts.read_bytes) for t in tiers]
        seconds = []
        for _ in range(ROUNDS):
            gc.collect()
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if reference is None:
            reference = gradients
        latest = handle._limiter.latest if handle is not None else None
        plan = latest.plan if latest is not None else None  # as predicted before any step, not at the pace of those that ran
        moved = sum(m.encoded_bytes for m in plan.moves if stages(m.decision)[1] is not None) if plan is not None else 0
        after = [(t.counts.written_bytes, t.counts.read_bytes) for t in tiers]
        traffic = [sum(a[k] - b[k] for a, b in zip(after, before, strict=True)) // ROUNDS for k in range(2)]
        row = {
            "contender": name,
            "peak_bytes": peak,
            "budget_bytes": budget,
            "predicted_peak_bytes": plan.predicted_peak_bytes if plan is not None else peak,
            "seconds": statistics.median(seconds),
            "predicted_seconds": plan.plain_seconds + plan.predicted_extra_seconds if plan is not None else None,
            "planned_transfer_bytes": moved,
            "written_bytes": traffic[0],
            "read_bytes": traffic[1],
            "replayed": len(plan.replayed) if plan is not None else 0,
            "moves": len(plan.moves) if plan is not None else 0,
            "same_gradients": all(torch.equal(a, b) for a, b in zip(reference, gradients, strict=True)),
            "notes": list(plan.notes) if plan is not None else [],
        }
        row["holds"] = name == "plain" or (peak <= budget and row["same_gradients"] and traffic[0] == traffic[1] == moved)
        rows.append(row)
        print(row, flush=True)
        if handle is not None:
            handle.remove()
        save(
            "disk_tier",
            rows,
            link={"write_bytes_per_second": link.write_bytes_per_second, "read_bytes_per_second": link.read_bytes_per_second},
        )
    for row in rows:
        row["over_plain"] = row["seconds"] / rows[0]["seconds"] - 1
        if row["predicted_seconds"] is not None:
            row["prediction_error"] = row["predicted_seconds"] / row["seconds"] - 1
    save(
        "disk_tier", rows, link={"write_bytes_per_second": link.write_bytes_per_second, "read_bytes_per_second": link.read_bytes_per_second}
    )
    print(machine())


if __name__ == "__main__":
    main()
