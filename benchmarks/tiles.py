"""Tiles: the smallest budget with them and without, and their time at the smallest budget without.

python -m benchmarks tiles [--quick]

Two steps whose peak no plan lowers: a GPT whose logits are the largest tensors, and a Llama with one long
sequence, whose MLPs and logits are. *Recomputation alone* is ``limit_memory(model, "min")``. *Tiles* are
``tiles="auto"``. Memory is what a step takes beyond parameters and gradients. The steps of a model run one
after the other in one run. The picture shows what is live at the peak, by the simulation of each plan.
"""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from typing import Any

import torch

from benchmarks.cases import language
from benchmarks.common import (
    RESULTS,
    Case,
    keep_pages,
    median_difference,
    paired,
    quick,
    save,
    step_of,
    total_peak,
)
from lowtide import Plan, StepGraph, limit_memory
from lowtide.plan.simulate.holders import pieces_at_peak
from lowtide.plan.simulate.simulator import Simulator
from lowtide.remedies import LOSS
from lowtide.run.messages import LowtideWarning

PICTURE = RESULTS.parent.parent / "docs" / "img" / "long_context.png"
WAYS = ("plain", "recomputation alone, min", "tiles, the same budget", "tiles, min")
KINDS = {
    "logits and loss": "#d95f02",
    "MLPs": "#7570b3",
    "attention": "#1b9e77",
    "everything else": "#999999",
}

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
    batch, models = case.batch(), [case.build() for _ in WAYS]
    plain, alone, same, least = models
    own = 2 * sum(p.nbytes for p in plain.parameters())
    handles = [limit_memory(plain, policy="keep_all", progress=False)]
    handles.append(limit_memory(alone, "min", progress=False))
    steps = [step_of(model, batch) for model in models]
    for step in steps[:2]:
        step()
    budget = handles[1].plan.budget_bytes  # type: ignore[union-attr]
    handles.append(limit_memory(same, budget, tiles="auto", progress=False))
    handles.append(limit_memory(least, "min", tiles="auto", progress=False))
    for step in steps[2:]:
        step()
    plain_live = live_at_peak(handles[0].graph, handles[0].plan)  # type: ignore[arg-type]
    handles[0].remove()
    held = [live_at_peak(handle.graph, handle.plan) for handle in handles[1:]]  # type: ignore[arg-type]
    peaks = [total_peak(model, batch, step) for model, step in zip(models, steps, strict=True)]
    seconds = paired(steps, rounds, UNSETTLED)
    seconds_alone = seconds[1]
    gradients = [[p.grad for p in model.parameters()] for model in models]
    differences = [
        max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, gradients[0], strict=True))  # type: ignore
        for one in gradients
    ]
    budgets = [None, *(handle.plan.budget_bytes for handle in handles[1:])]  # type: ignore[union-attr]
    notes = [(), *(handle.plan.notes for handle in handles[1:])]  # type: ignore[union-attr]
    return {
        "model": case.name,
        "own_bytes": own,
        "ways": [
            {
                "way": way,
                "budget_bytes": budget,
                "peak_bytes": peak,
                "live_at_peak": live,
                "seconds": statistics.median(times),
                "beside_recomputation": median_difference(times, seconds_alone)
                / statistics.median(seconds_alone),
                "difference": difference,
                "notes": note,
            }
            for way, budget, peak, live, times, difference, note in zip(
                WAYS, budgets, peaks, [plain_live, *held], seconds, differences, notes, strict=True
            )
        ],
    }


def live_at_peak(graph: StepGraph, plan: Plan) -> dict[str, int]:
    """Bytes at a plan's peak, beyond parameters and gradients, by what made them."""
    simulator, found = Simulator(graph), Counter[str]()
    for piece in pieces_at_peak(simulator, simulator.simulate(plan.stored)):
        kind = "logits and loss" if piece.name == LOSS else "everything else"
        if piece.name != LOSS and ".mlp" in piece.module:
            kind = "MLPs"
        if piece.name != LOSS and ".attention" in piece.module:
            kind = "attention"
        found[kind] += piece.bytes
    return dict(found)


def draw(rows: list[dict[str, Any]]) -> None:
    """The picture: a bar for each way, of what is live at its peak."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for place, row in enumerate(rows):
        axes = figure.add_subplot(1, len(rows), place + 1)
        ways = [way for way in row["ways"] if way["way"] != "tiles, the same budget"]
        begin = [0.0] * len(ways)
        for kind, color in KINDS.items():
            sizes = [way["live_at_peak"].get(kind, 0) / 2**20 for way in ways]
            axes.barh(range(len(ways)), sizes, left=begin, color=color, label=kind)
            begin = [one + size for one, size in zip(begin, sizes, strict=True)]
        for at, end in enumerate(begin):
            axes.text(end, at, f" {end:,.0f} MiB", va="center", fontsize=8)
        names = [way["way"].replace("recomputation", "recompute").replace(", min", ",\nmin") for way in ways]
        axes.set_yticks(range(len(ways)), names, fontsize=8)
        axes.set_xlim(0, 1.25 * max(begin))
        axes.invert_yaxis()
        axes.set_title(row["model"], fontsize=9)
        axes.set_xlabel("MiB live at the peak, beyond parameters and gradients", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    figure.savefig(PICTURE, dpi=150)


def main() -> None:
    """Measure, write the results and the picture."""
    warnings.simplefilter("ignore", LowtideWarning)
    torch.set_num_threads(1)
    keep_pages()
    rows = list[dict[str, Any]]()
    for case in cases():
        rows.append(row_of(case, 3 if quick() else 5))
        for way in rows[-1]["ways"]:
            above = (way["peak_bytes"] - rows[-1]["own_bytes"]) / 2**20
            beside = 100 * way["beside_recomputation"]
            print(f"{case.name}: {way['way']}: {above:,.1f} MiB, {beside:+.1f} %", flush=True)
    if not quick():
        save("tiles", rows=rows)
        draw(rows)


if __name__ == "__main__":
    main()
