"""Against `torch.utils.checkpoint` on every block: extra time at the rival's own peak, and with nothing to give up.

python -m benchmarks versus_checkpoint
"""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.cases import gpt, llama
from benchmarks.common import Case, median_difference, paired, rounds_within, save, step_of, total_peak, twins
from lowtide import BudgetError, limit_memory


def checkpoint_blocks(model: torch.nn.Module) -> None:
    """Wrap the forward of every block."""
    for block in model.blocks:  # type: ignore[union-attr]
        forward = block.forward

        def again(*args: Any, forward: Any = forward) -> Any:
            return checkpoint(forward, *args, use_reentrant=False)

        block.forward = again


def row_of(case: Case, seconds_for_it: float = 100.0) -> dict[str, Any]:
    """Plain, rival, planned at the rival's peak, planned at 100 %, in turn."""
    plain, rival, planned, whole = twins(case.build(), 4)
    batch = case.batch()
    checkpoint_blocks(rival)
    steps = [step_of(model, batch) for model in (plain, rival, planned, whole)]
    steps[0]()
    steps[1]()
    plain_peak, rival_peak = total_peak(plain, batch, steps[0]), total_peak(rival, batch, steps[1])
    handle = limit_memory(planned, budget=1)
    try:
        handle.prepare(**batch)
    except BudgetError as error:
        smallest = error.smallest_bytes or 0
    handle.remove()
    handle = limit_memory(planned, budget=rival_peak)
    limit_memory(whole, budget="100%").share_costs(handle)
    for step in steps[2:]:
        for _ in range(3):
            step()
    peak = total_peak(planned, batch, steps[2])
    rounds = rounds_within(steps, seconds_for_it)
    seconds = paired(steps, rounds)
    base = statistics.median(seconds[0])
    extra = [median_difference(found, seconds[0]) / base for found in seconds]
    plan = handle.plan
    assert plan is not None
    row = {
        "model": case.name,
        "plain_peak_bytes": plain_peak,
        "rival_peak_bytes": rival_peak,
        "planned_peak_bytes": peak,
        "smallest_budget_bytes": smallest,
        "smallest_over_rival": smallest / rival_peak,
        "rounds": rounds,
        "plain_seconds": base,
        "rival_extra": extra[1],
        "planned_extra": extra[2],
        "predicted_extra": plan.predicted_extra_seconds / base,
        "planned_over_rival": extra[2] / extra[1],
        "full_budget_extra": extra[3],
        "gap": plan.gap,
        "holds": peak <= rival_peak and extra[2] <= 0.5 * extra[1] and extra[3] < 0.03,
    }
    print(
        f"{case.name:14} plain {base:.2f} s {plain_peak / 2**20:.0f} MiB | per block {rival_peak / 2**20:.0f} MiB {100 * extra[1]:+.1f} % | "
        f"planned {peak / 2**20:.0f} MiB {100 * extra[2]:+.1f} % (x{row['planned_over_rival']:.2f}) | 100 % budget {100 * extra[3]:+.1f} % | "
        f"smallest x{row['smallest_over_rival']:.2f} of per block",
        flush=True,
    )
    return row


def main() -> None:
    """Run and write benchmarks/results/versus_checkpoint.json."""
    warnings.simplefilter("ignore")
    shapes = [(8, 384), (12, 512), (12, 768)]
    cases = [make(layers, width) for layers, width in shapes for make in (gpt, llama)]
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append(row_of(case))
        save("versus_checkpoint", rows)


if __name__ == "__main__":
    main()
