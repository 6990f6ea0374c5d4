"""Fit the one free number of the speed model to published iteration times, and say how far off each is.

python -m benchmarks estimate_speed
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from lowtide.estimate import configure
from lowtide.estimate.devices import device
from lowtide.estimate.speed import EFFICIENCY, step_time

PUBLISHED = Path(__file__).parent.parent / "tests" / "estimate" / "published" / "2205.05198_table5_e2e.csv"
WAYS: dict[str, dict[str, Any]] = {
    "full_recompute_iter_s": dict(recompute="full"),
    "present_work_iter_s": dict(recompute="selective", sequence_parallel=True),
}


def rows(efficiency: float) -> list[dict[str, Any]]:
    """Measured and predicted seconds of every iteration in arXiv 2205.05198, Table 5."""
    found = []
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for column, settings in WAYS.items():
                config = configure(row["model"], as_published=True, **settings)
                predicted, measured = step_time(config, device("a100"), efficiency).total, float(row[column])
                how = column.removesuffix("_iter_s").replace("_", " ")
                found.append(
                    {
                        "model": row["model"],
                        "case": how,
                        "measured_seconds": measured,
                        "predicted_seconds": predicted,
                        "off": predicted / measured - 1,
                    }
                )
    return found


def fit() -> float:
    """The efficiency with the least squared logarithmic error."""
    candidates = [index / 1000 for index in range(300, 1000)]
    return min(candidates, key=lambda value: sum(math.log1p(row["off"]) ** 2 for row in rows(value)))


def main() -> None:
    """Write the result file."""
    from benchmarks.common import save

    best = fit()
    for row in rows(best):
        print(
            f"{row['model']:>5} {row['case']:<15} {row['measured_seconds']:7.2f} s measured, "
            f"{row['predicted_seconds']:7.2f} predicted, {100 * row['off']:+.1f} %"
        )
    print(f"efficiency {best:.3f} (in use: {EFFICIENCY:.3f})")
    save("estimate_speed", rows(best), efficiency=best)
