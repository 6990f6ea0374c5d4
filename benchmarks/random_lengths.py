"""A thousand steps of random lengths under one budget: how many plannings they cost, whether each keeps the
budget, and how much longer they take than the same steps with plans at hand.

python -m benchmarks random_lengths [--quick] [--resume]

A first model runs all steps and its peaks are measured, those of its first steps included. Then a second one
that has planned nothing runs them, in turn with the first, which has its plans by now: the sum of the
differences is what planning for random lengths costs. ``--quick`` runs a quarter of the steps, whose share is
about four times that of a thousand.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import kept_rows, quick, run_key, save, total_peak
from lowtide import Handle, limit_memory

SHORTEST, LONGEST, ROWS = 16, 512, 4
STEPS, QUICK_STEPS = 1000, 250
MOST_PLANNINGS, MOST_SHARE = 5, 0.03
SHARES = (0.7, 0.5)
"""Budgets, as shares of the longest step's plain peak."""
SLACK_BYTES = 8192
"""What a step may take above its budget: Python's random state and the like."""


def build() -> torch.nn.Module:
    """Four layers of GPT-2 with 64 features over 128 tokens, random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(vocab_size=128, n_positions=LONGEST, n_embd=64, n_layer=4, n_head=4)
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, use_cache=False)).train()


def batch_of(length: int) -> dict[str, Any]:
    """A batch of random tokens."""
    tokens = torch.randint(128, (ROWS, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "labels": tokens}


def lengths_of(steps: int, seed: int) -> list[int]:
    """Random lengths."""
    draw = random.Random(seed)
    return [draw.randint(SHORTEST, LONGEST) for _ in range(steps)]


def step_of(model: torch.nn.Module, length: int) -> Callable[[], None]:
    """One forward and backward, whose gradients go: between steps only parameters are resident."""
    batch = batch_of(length)

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def _timed(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def row_of(share: float, steps: int, seed: int = 0) -> dict[str, Any]:
    """All steps under one budget."""
    lengths = lengths_of(steps, seed)
    plain = build()
    budget = int(share * total_peak(plain, batch_of(LONGEST), step_of(plain, LONGEST)))
    ready, fresh = build(), build()
    limit_memory(ready, budget)
    above = {}
    for number, length in enumerate(lengths):
        peak = total_peak(ready, batch_of(length), step_of(ready, length))
        if peak > budget + SLACK_BYTES:
            above[number] = peak - budget
    handle: Handle = limit_memory(fresh, budget)
    extra: list[tuple[bool, float]] = []
    seconds = 0.0
    draw = random.Random(seed)
    for length in lengths:
        order = [ready, fresh]
        draw.shuffle(order)
        known = len(handle.plans)
        took = {id(model): _timed(step_of(model, length)) for model in order}
        seconds += took[id(ready)]
        extra.append((len(handle.plans) > known, took[id(fresh)] - took[id(ready)]))
    planned = sum(more for looked, more in extra if looked)
    cost = sum(more for _, more in extra)
    row = {
        "budget_share": share,
        "run": run_key(),
        "budget_bytes": budget,
        "steps": steps,
        "distinct_lengths": len(set(lengths)),
        "plannings": handle.plannings,
        "looks": sum(looked for looked, _ in extra),
        "steps_above_budget": len(above),
        "seconds_with_plans": seconds,
        "more_seconds": cost,
        "more_seconds_of_looks": planned,
        "more_of_other_steps": statistics.median(more for looked, more in extra if not looked),
        "more_share": cost / seconds,
        "more_share_of_looks": planned / seconds,
    }
    row["holds"] = (
        not above and row["plannings"] <= MOST_PLANNINGS and row["more_share"] * steps / STEPS <= MOST_SHARE
    )
    print(
        f"{100 * share:.0f} %: {steps} steps, {row['distinct_lengths']} lengths, {row['looks']} looked at, "
        f"{row['plannings']} plannings; {len(above)} above the budget; {seconds:.1f} s with plans at hand, "
        f"{100 * row['more_share']:+.1f} % without ({100 * row['more_share_of_looks']:.1f} % in the steps "
        "that were looked at)",
        flush=True,
    )
    return row


def main() -> None:
    """Run and write benchmarks/results/random_lengths.json."""
    warnings.simplefilter("ignore")
    steps = QUICK_STEPS if quick() else STEPS
    rows = kept_rows("random_lengths")
    known = {row["budget_share"] for row in rows}
    for share in SHARES:
        if share not in known:
            rows.append(row_of(share, steps))
            save("random_lengths", rows)


if __name__ == "__main__":
    main()
