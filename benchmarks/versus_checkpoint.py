"""Against `torch.utils.checkpoint` on every block: extra time at the rival's own peak, and with nothing to
give up.

python -m benchmarks versus_checkpoint [--quick] [--resume]

Two plans stand at the rival's peak: ``optimal``, which recomputes, as the rival does, and ``mixed``, which
has the disk beside it. The C library is told to keep its pages (`benchmarks.common.keep_pages`), as they stay
where one kind of step follows another of its kind: here each follows one of another kind, whose peak is not
its own.
"""

from __future__ import annotations

import json
import statistics
import warnings
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.cases import gpt, llama
from benchmarks.common import (
    RESULTS,
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
    twins,
    unlimited_step_of,
)
from lowtide import BudgetError, limit_memory, measure_links, policies

SHAPES = ((8, 384), (12, 512), (12, 768))
"""Layers and features."""


def checkpoint_blocks(model: torch.nn.Module) -> None:
    """Wrap the forward of every block."""
    for block in model.blocks:  # type: ignore[union-attr]
        forward = block.forward

        def again(*args: Any, forward: Any = forward) -> Any:
            return checkpoint(forward, *args, use_reentrant=False)

        block.forward = again


def row_of(case: Case, seconds_for_it: float = 90.0) -> dict[str, Any]:
    """Plain, rival, planned at the rival's peak without and with the disk, in turn."""
    plain, rival, planned, mixed = twins(case.build(), 4)
    batch = case.batch()
    checkpoint_blocks(rival)
    steps = [step_of(model, batch) for model in (plain, rival, planned, mixed)]
    steps[0]()
    steps[1]()
    plain_peak, rival_peak = total_peak(plain, batch, steps[0]), total_peak(rival, batch, steps[1])
    handle = limit_memory(planned, budget="1KiB")
    try:
        handle.prepare(**batch)
    except BudgetError as error:
        smallest = error.smallest_bytes or 0
    handle.remove()
    handle = limit_memory(planned, budget=rival_peak)
    with_disk = limit_memory(
        mixed, budget=rival_peak, policy=policies.mixed("disk", links=measure_links("disk"))
    )
    for step in steps[2:]:
        for _ in range(UNSETTLED):
            step()
    peaks = [total_peak(model, batch, step) for model, step in zip((planned, mixed), steps[2:], strict=True)]
    rounds = rounds_within(steps, seconds_for_it, least=4)
    seconds = paired(steps, rounds)
    base = statistics.median(seconds[0])
    extra = [median_difference(found, seconds[0]) / base for found in seconds]
    plan, disk_plan = handle.plan, with_disk.plan
    assert plan is not None and disk_plan is not None
    row = {
        "model": case.name,
        "run": run_key(),
        "plain_peak_bytes": plain_peak,
        "rival_peak_bytes": rival_peak,
        "planned_peak_bytes": peaks[0],
        "mixed_peak_bytes": peaks[1],
        "smallest_budget_bytes": smallest,
        "smallest_over_rival": smallest / rival_peak,
        "rounds": rounds,
        "plain_seconds": base,
        "rival_extra": extra[1],
        "planned_extra": extra[2],
        "predicted_extra": plan.predicted_extra_seconds / base,
        "planned_over_rival": extra[2] / extra[1],
        "gap": plan.gap,
        "mixed_extra": extra[3],
        "mixed_predicted_extra": disk_plan.predicted_extra_seconds / base,
        "mixed_over_rival": extra[3] / extra[1],
        "mixed_moves": len(disk_plan.moves),
        "planned_holds": peaks[0] <= rival_peak and extra[2] <= 0.5 * extra[1],
        "mixed_holds": peaks[1] <= rival_peak and extra[3] <= 0.5 * extra[1],
    }
    print(
        f"{case.name:14} plain {base:.2f} s {plain_peak / 2**20:.0f} MiB | per block "
        f"{rival_peak / 2**20:.0f} MiB {100 * extra[1]:+.1f} % | recomputing {peaks[0] / 2**20:.0f} MiB "
        f"{100 * extra[2]:+.1f} % (x{row['planned_over_rival']:.2f}) | with the disk {peaks[1] / 2**20:.0f} "
        f"MiB {100 * extra[3]:+.1f} % (x{row['mixed_over_rival']:.2f}) | smallest "
        f"x{row['smallest_over_rival']:.2f} of per block",
        flush=True,
    )
    return row


def full_budget_of(case: Case, seconds_for_it: float = 45.0) -> dict[str, Any]:
    """A budget that nothing has to be given up for, against the same model without a limit, in turn."""
    model, batch = case.build(), case.batch()
    limited, unlimited = step_of(model, batch), unlimited_step_of(model, batch)
    limit_memory(model, budget="100%")
    for _ in range(3):
        limited()
    seconds = paired(
        [limited, unlimited], rounds_within([limited, unlimited], seconds_for_it, least=7, most=31)
    )
    extra = median_difference(*seconds) / statistics.median(seconds[1])
    print(f"{case.name:14} 100 % budget {100 * extra:+.1f} %", flush=True)
    return {"full_budget_extra": extra, "full_budget_holds": extra < 0.03}


def main(shapes: tuple[tuple[int, int], ...] = SHAPES, families: tuple[str, ...] = ("gpt", "llama")) -> None:
    """Run and write benchmarks/results/versus_checkpoint.json; rows of other models that stand there stay."""
    warnings.simplefilter("ignore")
    pages = keep_pages()
    before = RESULTS / "versus_checkpoint.json"
    rows = {row["model"]: row for row in json.loads(before.read_text())["rows"]} if before.exists() else {}
    known = {row["model"] for row in kept_rows("versus_checkpoint")}
    for layers, width in shapes[:2] if quick() else shapes:
        for family in families:
            case = {"gpt": gpt, "llama": llama}[family](layers, width)
            if case.name in known:
                continue
            seconds = (30.0, 15.0) if quick() else (90.0, 45.0)
            rows[case.name] = {
                **row_of(case, seconds[0]),
                **full_budget_of(case, seconds[1]),
                "pages_kept": pages,
            }
            save("versus_checkpoint", list(rows.values()))


if __name__ == "__main__":
    main()
