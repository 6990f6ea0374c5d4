"""Predicted against measured: peak bytes and extra seconds of planned steps, on six models at four budgets each.

python -m benchmarks accuracy

A plan's seconds follow the pace of its steps. What it predicts is read twice: when the paired rounds are over, in seconds, and *ahead* of them,
as a share of the plain step that it predicts with it, for a machine that has become faster or slower since then did so for both.

The C library is told to keep its pages (`benchmarks.common.keep_pages`), so that the time of operations is measured and not the system's.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

from benchmarks.cases import six
from benchmarks.common import (
    UNSETTLED,
    Case,
    keep_pages,
    median_difference,
    paired,
    rounds_within,
    save,
    step_of,
    total_peak,
    unlimited_step_of,
)
from lowtide import BudgetError, limit_memory

SHARES = (80, 65, 50)


def rows_of(case: Case, seconds_for_a_row: float = 40.0) -> list[dict[str, Any]]:
    """One row a budget: three shares of the plain peak, and the smallest budget that can be met."""
    limited, batch = case.build(), case.batch()
    plain_step = unlimited_step_of(limited, batch)
    plain_step()
    peak = total_peak(limited, batch, plain_step)
    limited.zero_grad(set_to_none=True)
    handle = limit_memory(limited, budget=1)
    try:
        handle.prepare(**batch)
        raise AssertionError("a budget of one byte was met")
    except BudgetError as error:
        smallest = error.smallest_bytes
    assert smallest is not None
    handle.remove()
    first = handle
    rows = []
    for label, budget in [*((f"{share} %", peak * share // 100) for share in SHARES), ("smallest", smallest)]:
        handle = limit_memory(limited, budget=max(budget, smallest))
        handle.share_costs(first)
        step = step_of(limited, batch)
        begin = time.perf_counter()
        limited.zero_grad(set_to_none=True)
        handle.prepare(**batch)
        planning = time.perf_counter() - begin
        for _ in range(UNSETTLED):
            step()
        measured = total_peak(limited, batch, step)
        ahead = handle.plan
        rounds = rounds_within([plain_step, step], seconds_for_a_row, most=81)
        plain_seconds, planned_seconds = paired([plain_step, step], rounds)
        plan = handle.plan
        assert plan is not None and ahead is not None
        base = statistics.median(plain_seconds)
        extra = median_difference(planned_seconds, plain_seconds)
        off = plan.predicted_extra_seconds - extra
        ahead_off = ahead.predicted_extra_seconds / ahead.plain_seconds - extra / base
        rows.append(
            {
                "model": case.name,
                "budget": label,
                "budget_bytes": plan.budget_bytes,
                "plain_peak_bytes": peak,
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "measured_peak_bytes": measured,
                "peak_error": plan.predicted_peak_bytes / measured - 1,
                "rounds": rounds,
                "plain_seconds": base,
                "predicted_plain_seconds": plan.plain_seconds,
                "predicted_extra_seconds": plan.predicted_extra_seconds,
                "measured_extra_seconds": extra,
                "off_of_step": off / base,
                "off_of_extra": off / extra if extra else 0.0,
                "ahead_plain_seconds": ahead.plain_seconds,
                "ahead_extra_seconds": ahead.predicted_extra_seconds,
                "ahead_off_of_step": ahead_off,
                "gap": plan.gap,
                "planning_seconds": planning,
                "within_budget": measured <= (plan.budget_bytes or measured),
                "peak_holds": abs(plan.predicted_peak_bytes / measured - 1) <= 0.01,
                "time_holds": abs(off) <= max(0.15 * abs(extra), 0.02 * base),
                "ahead_holds": abs(ahead_off) <= max(0.15 * abs(extra) / base, 0.02),
            }
        )
        handle.remove()
        row = rows[-1]
        print(
            f"{case.name:16} {label:9} peak {measured / 2**20:7.1f} MiB ({100 * row['peak_error']:+.2f} %)  extra {100 * extra / base:+6.1f} % "
            f"predicted {100 * plan.predicted_extra_seconds / base:+6.1f} %  ahead "
            f"{100 * ahead.predicted_extra_seconds / ahead.plain_seconds:+6.1f} %  gap {100 * plan.gap:.2f} %  planned in {planning:.1f} s",
            flush=True,
        )
    return rows


def main() -> None:
    """Run and write benchmarks/results/accuracy.json."""
    warnings.simplefilter("ignore")
    pages = keep_pages()
    rows: list[dict[str, Any]] = []
    for case in six():
        rows += rows_of(case)
        held = {name: sum(row[name] for row in rows) for name in ("within_budget", "peak_holds", "time_holds", "ahead_holds")}
        save("accuracy", rows, held={**held, "of": len(rows)}, pages_kept=pages)
        print(held, "of", len(rows), flush=True)


if __name__ == "__main__":
    main()
