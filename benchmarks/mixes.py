"""How far plans that recompute and move are from the best possible, over links of every speed.

python -m benchmarks mixes
"""

from __future__ import annotations

import time

from benchmarks.cases import gpt
from benchmarks.common import save
from lowtide import limit_memory, policies
from lowtide.plan import make, plain
from lowtide.plan.data import Link

SPEEDS = (20e6, 50e6, 100e6, 400e6, 2e9)
SHARES = (0.8, 0.65, 0.55)


def main() -> None:
    """Run and write benchmarks/results/mixes.json."""
    case = gpt(8, 384)
    model, batch = case.build().train(), case.batch()
    handle = limit_memory(model, budget="60%")
    handle.prepare(**batch)
    graph = handle.graph
    assert graph is not None
    handle.remove()
    peak = plain(graph).peak_bytes
    rows = []
    for share in SHARES:
        budget = int(share * peak)
        recomputed = make(graph, budget=budget).predicted_extra_seconds
        for speed in SPEEDS:
            begin = time.perf_counter()
            plan = policies.mixed("disk", links={"disk": Link(speed, speed, 1e-4)})(graph, budget)
            rows.append(
                {
                    "model": case.name,
                    "share": share,
                    "bytes_per_second": speed,
                    "extra": plan.predicted_extra_seconds / plan.plain_seconds,
                    "bound": plan.bound_extra_seconds / plan.plain_seconds,
                    "gap": plan.gap,
                    "extra_by_recomputing": recomputed / plan.plain_seconds,
                    "moves": len(plan.moves),
                    "replayed": len(plan.replayed),
                    "planning_seconds": time.perf_counter() - begin,
                    "holds": plan.gap <= 0.01 and plan.predicted_peak_bytes <= budget,
                }
            )
            print(rows[-1], flush=True)
    save("mixes", rows)
