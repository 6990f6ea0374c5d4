"""Predicted against measured: peak bytes and extra seconds of planned steps, on six models at four budgets
each.

python -m benchmarks accuracy [--quick] [--resume]

Two predictions are scored, each against what the paired rounds measure: the *forecast*, read before any step
runs under the plan, and the *calibrated* times, read when the rounds are over. The forecast is what chose the
plan. It *holds* where its extra time is at most 2 % of the step or 15 % of the extra time off; the plain
step's own time is scored beside it, and holds within 15 %.

The C library is told to keep its pages (`benchmarks.common.keep_pages`), so that the time of operations is
measured and not the system's.
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
    kept_rows,
    median_difference,
    paired,
    quick,
    rounds_within,
    run_key,
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
    handle = limit_memory(limited, budget="1KiB")
    try:
        handle.prepare(**batch)
        raise AssertionError("a budget of one byte was met")
    except BudgetError as error:
        smallest = error.smallest_bytes
    assert smallest is not None
    handle.remove()
    rows = []
    for label, budget in [*((f"{share} %", peak * share // 100) for share in SHARES), ("smallest", smallest)]:
        handle = limit_memory(limited, budget=max(budget, smallest))
        step = step_of(limited, batch)
        begin = time.perf_counter()
        limited.zero_grad(set_to_none=True)
        forecast = handle.prepare(**batch)  # before any step
        planning = time.perf_counter() - begin
        for _ in range(UNSETTLED):
            step()
        measured = total_peak(limited, batch, step)
        rounds = rounds_within([plain_step, step], seconds_for_a_row, most=81)
        plain_seconds, planned_seconds = paired([plain_step, step], rounds)
        plan = handle.plan
        assert (
            plan is not None
            and plan.calibrated_extra_seconds is not None
            and plan.calibrated_plain_seconds is not None
        )
        base = statistics.median(plain_seconds)
        extra = median_difference(planned_seconds, plain_seconds)
        forecast_off, off = forecast.predicted_extra_seconds - extra, plan.calibrated_extra_seconds - extra
        allowed = max(0.15 * abs(extra), 0.02 * base)
        rows.append(
            {
                "model": case.name,
                "run": run_key(),
                "budget": label,
                "budget_bytes": plan.budget_bytes,
                "plain_peak_bytes": peak,
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "measured_peak_bytes": measured,
                "peak_error": plan.predicted_peak_bytes / measured - 1,
                "rounds": rounds,
                "plain_seconds": base,
                "measured_extra_seconds": extra,
                "forecast_plain_seconds": forecast.plain_seconds,
                "forecast_extra_seconds": forecast.predicted_extra_seconds,
                "forecast_off_of_step": forecast_off / base,
                "forecast_plain_error": forecast.plain_seconds / base - 1,
                "calibrated_plain_seconds": plan.calibrated_plain_seconds,
                "calibrated_extra_seconds": plan.calibrated_extra_seconds,
                "calibrated_off_of_step": off / base,
                "planned_again": forecast.stored != plan.stored,
                "gap": plan.gap,
                "planning_seconds": planning,
                "within_budget": measured <= (plan.budget_bytes or measured),
                "peak_holds": abs(plan.predicted_peak_bytes / measured - 1) <= 0.01,
                "forecast_holds": abs(forecast_off) <= allowed,
                "forecast_plain_holds": abs(forecast.plain_seconds / base - 1) <= 0.15,
                "calibrated_holds": abs(off) <= allowed,
            }
        )
        handle.remove()
        row = rows[-1]
        print(
            f"{case.name:16} {label:9} peak {measured / 2**20:7.1f} MiB ({100 * row['peak_error']:+.2f} %)  "
            f"extra {100 * extra / base:+6.1f} % forecast "
            f"{100 * forecast.predicted_extra_seconds / base:+6.1f} %  calibrated "
            f"{100 * plan.calibrated_extra_seconds / base:+6.1f} %  plain "
            f"{100 * row['forecast_plain_error']:+.0f} % off  gap {100 * plan.gap:.2f} %  planned in "
            f"{planning:.1f} s",
            flush=True,
        )
    return rows


def main() -> None:
    """Run and write benchmarks/results/accuracy.json."""
    warnings.simplefilter("ignore")
    pages = keep_pages()
    rows = kept_rows("accuracy")
    known = {row["model"] for row in rows}
    for case in six():
        if case.name in known:
            continue
        rows += rows_of(case, 8.0 if quick() else 40.0)
        names = ("within_budget", "peak_holds", "forecast_holds", "forecast_plain_holds", "calibrated_holds")
        held = {name: sum(row[name] for row in rows) for name in names}
        save("accuracy", rows, held={**held, "of": len(rows)}, pages_kept=pages)
        print(held, "of", len(rows), flush=True)


if __name__ == "__main__":
    main()
