"""How long planning takes, and how far the plan is from the best possible.

python -m benchmarks planning_time [--quick] [--resume]

A model's first step under a limit is a real one that is looked at, and planned for at its end: it is stated
beside a plain step. Then each budget is planned for from that step's graph (``solve``). What the first plan
of a process imports and measures once is stated beside the rows. Times are medians of three; ``--quick``
takes one, and leaves out the largest model.
"""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.cases import gpt
from benchmarks.common import Case, kept_rows, quick, run_key, save, step_of
from lowtide import BudgetError, limit_memory
from lowtide.plan import make, plain
from lowtide.plan.search import search_of

LIMIT_SECONDS = {12: 2.0, 24: 4.0}
"""Layers -> what planning may take, the step itself apart."""


def rows_of(case: Case, layers: int, runs: int) -> list[dict[str, Any]]:
    """One row a budget. The last is the smallest, which a refusal has named, in a time of its own."""
    model, batch = case.build(), case.batch()
    step = step_of(model, batch)
    step()
    ordinary = statistics.median(_seconds(step) for _ in range(runs))
    _forget()
    handle = limit_memory(model, budget="90%")
    first = _seconds(step)
    graph, searched = handle.graph, handle.plannings
    assert graph is not None
    step()
    whole = {
        "plain_step_seconds": ordinary,
        "first_step_seconds": first,
        "plannings_in_two_steps": handle.plannings,
        "operations": len(graph.operations),
    }
    planned_once = searched == handle.plannings == 1
    handle.remove()
    print(f"{case.name}: first step {first:.1f} s, a plain one {ordinary:.1f} s", flush=True)
    _forget()
    begin, smallest = time.perf_counter(), None
    try:
        make(graph, budget=1)
    except BudgetError as error:
        smallest = error.smallest_bytes
    naming = time.perf_counter() - begin
    assert smallest is not None
    rows = []
    peak = plain(graph).peak_bytes
    for label, budget in [
        *((f"{share}%", peak * share // 100) for share in (80, 60, 40)),
        ("smallest", smallest),
    ]:
        if budget < smallest:
            print(f"{case.name} at {label}: below the smallest", flush=True)
            continue
        solves, gaps = [], []
        for _ in range(runs):
            _forget()
            solves.append(_seconds(partial(make, graph, budget=budget)))
            plan = make(graph, budget=budget)
            gaps.append(plan.gap)
        solve = statistics.median(solves)
        rows.append(
            {
                "model": case.name,
                "run": run_key(),
                "budget": label,
                **whole,
                "solve_seconds": solve,
                "gap": max(gaps),
                "extra": plan.predicted_extra_seconds / plan.plain_seconds,
                "peak_over_plain": plan.predicted_peak_bytes / plan.plain_peak_bytes,
                **({"naming_seconds": naming} if label == "smallest" else {}),
                "holds": solve < LIMIT_SECONDS[layers] and max(gaps) <= 0.01 and planned_once,
            }
        )
        print(
            f"{case.name} at {label}: {solve:.2f} s, gap {100 * max(gaps):.2f} % of the step",
            flush=True,
        )
    print(f"{case.name}: the smallest budget was named in {naming:.1f} s", flush=True)
    return rows


def _seconds(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _forget() -> None:
    search_of.cache_clear()


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
    warnings.simplefilter("ignore")
    once, runs = first_of_the_process(), 1 if quick() else 3
    rows = kept_rows("planning_time")
    cases = [
        (gpt(12, 768, batch=1, sequence=1024, dropout=0.1, fused=False), 12, "unfused, dropout"),
        (gpt(12, 768, batch=1, sequence=1024), 12, ""),
        (gpt(24, 1024, batch=1, sequence=1024), 24, ""),
    ]
    for case, layers, what in cases[: 2 if quick() else 3]:
        named = replace(case, name=f"{case.name}, {what}" if what else case.name)
        if not any(row["model"] == named.name for row in rows):
            rows += rows_of(named, layers, runs)
            save("planning_time", rows, first_of_process_seconds=once)


if __name__ == "__main__":
    main()
