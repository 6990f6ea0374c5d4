"""Tiles: the smallest budget with them and without, and their time at the smallest budget without.

python -m benchmarks tiles [--quick]

Two steps whose peak no plan lowers: a GPT whose logits are the largest tensors, and a Llama with one long
sequence, whose MLPs and logits are. *Recomputation alone* is ``limit_memory(model, "min")``. *Tiles* are
``tiles="auto"``. Memory is what a step takes beyond parameters and gradients. Each model runs in a process of
its own, and its steps one after the other in one run.
"""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import torch

from benchmarks.cases import language
from benchmarks.common import Case, keep_pages, median_difference, paired, quick, save, step_of, total_peak
from lowtide import limit_memory
from lowtide.run.messages import LowtideWarning

UNSETTLED = 1
"""Steps under a plan before those that are timed."""


def cases() -> list[Case]:
    """The models; small ones where few rounds are asked for."""
    length = 2048 if quick() else 16_384
    return [
        language(
            "gpt 8x256, 4 x 512 tokens, vocabulary 32,768", 4, 512, vocabulary=32_768, family="gpt", layers=8,
            width=256, heads=4, key_value_heads=4, hidden_width=1024,
        ),
        language(
            f"llama 4x128, 1 x {length:,} tokens, vocabulary 8,192", 1, length, vocabulary=8_192,
            family="llama", layers=4, width=128, heads=2, key_value_heads=2, hidden_width=512,
        ),
    ]  # fmt: skip


def row_of(case: Case, rounds: int) -> dict[str, Any]:
    """A model with and without tiles."""
    batch, models = case.batch(), [case.build() for _ in range(3)]
    alone, same, least = models
    own = 2 * sum(p.nbytes for p in alone.parameters())
    handles = [limit_memory(alone, "min", progress=False)]
    steps = [step_of(model, batch) for model in models]
    steps[0]()
    budget = handles[0].plan.budget_bytes  # type: ignore[union-attr]
    handles.append(limit_memory(same, budget, tiles="auto", progress=False))
    handles.append(limit_memory(least, "min", tiles="auto", progress=False))
    for step in steps[1:]:
        step()
    peaks = [total_peak(model, batch, step) for model, step in zip(models, steps, strict=True)]
    seconds = paired(steps, rounds, UNSETTLED)
    gradients = [[p.grad for p in model.parameters()] for model in models]
    differences = [
        max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, gradients[0], strict=True))  # type: ignore
        for one in gradients
    ]
    ways = ("recomputation alone, min", "tiles, the same budget", "tiles, min")
    return {
        "model": case.name,
        "own_bytes": own,
        "ways": [
            {
                "way": way,
                "budget_bytes": handle.plan.budget_bytes,  # type: ignore[union-attr]
                "peak_bytes": peak,
                "seconds": statistics.median(times),
                "extra": median_difference(times, seconds[0]) / statistics.median(seconds[0]),
                "difference": difference,
                "notes": handle.plan.notes,  # type: ignore[union-attr]
            }
            for way, handle, peak, times, difference in zip(
                ways, handles, peaks, seconds, differences, strict=True
            )
        ],
    }


def main() -> None:
    """Measure, write the results."""
    warnings.simplefilter("ignore", LowtideWarning)
    torch.set_num_threads(1)
    keep_pages()
    rows = list[dict[str, Any]]()
    for case in cases():
        rows.append(row_of(case, 3 if quick() else 5))
        for way in rows[-1]["ways"]:
            above = (way["peak_bytes"] - rows[-1]["own_bytes"]) / 2**20
            print(f"{case.name}: {way['way']}: {above:,.1f} MiB, {100 * way['extra']:+.1f} %", flush=True)
    save("tiles", rows=rows)


if __name__ == "__main__":
    main()
