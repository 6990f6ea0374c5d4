"""How long planning takes, from the model to the plan, and how far the plan is from the best possible.

python -m benchmarks planning_time

What the first plan of a process imports and measures once is stated beside the rows: it takes a few seconds,
more where the disk has to be read. Planning once more with other bytes resident, as the second step does, has
a time of its own. Times are medians of three.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import gpt
from benchmarks.common import Case, save
from lowtide import BudgetError, limit_memory
from lowtide.plan import Plan, make
from lowtide.plan.search.planner import planner_of

LIMIT_SECONDS = {12: 10.0, 24: 20.0}
RUNS = 3


def rows_of(case: Case, layers: int) -> list[dict[str, Any]]:
    """One row a budget; tracing and timing operations are part of each. The last is the smallest, which a
    refusal has named, in a time of its own.
    """
    model, batch = case.build(), case.batch()
    refused = limit_memory(model, budget=1)
    begin = time.perf_counter()
    try:
        refused.prepare(**batch)
        raise AssertionError("a budget of one byte was met")
    except BudgetError as error:
        naming, smallest = time.perf_counter() - begin, error.smallest_bytes
    finally:
        refused.remove()
    rows = []
    for budget in ("80%", "60%", "40%", "smallest"):
        try:
            runs = [
                _planned(model, batch, (smallest or budget) if budget == "smallest" else budget)
                for _ in range(RUNS)
            ]
        except BudgetError as error:
            print(f"{case.name} {budget}: {error}")
            continue
        seconds, solve, again = (statistics.median([float(run[k]) for run in runs]) for k in range(3))  # pyright: ignore
        plan = max((run[3] for run in runs), key=lambda plan: plan.gap)
        rows.append(
            {
                "model": case.name,
                "budget": budget,
                "seconds": seconds,
                "trace_seconds": seconds - solve,
                "solve_seconds": solve,
                "again_seconds": again,
                "gap": plan.gap,
                "extra": plan.predicted_extra_seconds / plan.plain_seconds,
                "peak_over_plain": plan.predicted_peak_bytes / plan.plain_peak_bytes,
                **({"naming_seconds": naming} if budget == "smallest" else {}),
                "holds": seconds < LIMIT_SECONDS[layers] and plan.gap <= 0.01,
            }
        )
        print(
            f"{case.name} at {budget}: {seconds:.1f} s, again {again:.2f} s, gap {100 * plan.gap:.2f} % of "
            "the step",
            flush=True,
        )
    print(f"{case.name}: the smallest budget was named in {naming:.1f} s", flush=True)
    return rows


def _forget() -> None:
    planner_of.cache_clear()


def _planned(
    model: torch.nn.Module, batch: dict[str, Any], budget: str | int
) -> tuple[float, float, float, Plan]:
    """Seconds from the model to the plan, of solving alone, and of solving with other bytes resident; and the
    plan.
    """
    _forget()
    handle = limit_memory(model, budget=budget)
    begin = time.perf_counter()
    try:
        plan = handle.prepare(**batch)
    finally:
        handle.remove()
    seconds = time.perf_counter() - begin
    graph, limit = handle.graph, plan.budget_bytes
    assert graph is not None and limit is not None
    _forget()
    begin = time.perf_counter()
    make(graph, budget=limit)
    solve = time.perf_counter() - begin
    begin = time.perf_counter()
    make(replace(graph, resident_bytes=graph.resident_bytes + 4096), budget=limit + 4096)
    return seconds, solve, time.perf_counter() - begin, plan


def first_of_the_process() -> float:
    """Seconds of planning a tiny model: what the first plan of a process imports and measures once, whatever
    it is for.
    """
    case = gpt(1, 64, batch=1, sequence=32)
    handle = limit_memory(case.build(), budget="100%")
    begin = time.perf_counter()
    handle.prepare(**case.batch())
    seconds = time.perf_counter() - begin
    handle.remove()
    print(f"first plan of the process: {seconds:.1f} s for a tiny model", flush=True)
    return seconds


def main() -> None:
    """Run and write benchmarks/results/planning_time.json."""
    once = first_of_the_process()
    rows = rows_of(gpt(12, 768, batch=1, sequence=1024, dropout=0.1, fused=False), 12)
    rows += rows_of(gpt(12, 768, batch=4, sequence=1024), 12)
    rows += rows_of(gpt(24, 1024, batch=4, sequence=1024), 24)
    save("planning_time", rows, first_of_process_seconds=once)


if __name__ == "__main__":
    main()
