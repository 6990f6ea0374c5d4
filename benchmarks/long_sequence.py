"""Long sequences: layers whose saved values wait on the next tier, against `save_on_cpu` and checkpointing
per block.

python -m benchmarks long_sequence
python -m benchmarks.long_sequence smoke    (a tiny one that writes nothing: does it run?)

On a GPU at 8k to 64k tokens in bfloat16, with pinned main memory as the next tier; on a CPU at 512 and 1k in
float32, with the disk. A row *holds* when the gradients are the plain step's bit by bit (where a plain step
repeats its own), the peak is the plan's (within 1 %), what the tier reserves (on a GPU: pins) is the most
that the plan has there at once, and, where the link suffices by the plan's own prediction, the step takes at
most 5 % longer than the plain one.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import lowtide
from benchmarks.cases import gpt
from benchmarks.common import (
    UNSETTLED,
    keep_pages,
    median_difference,
    paired,
    rounds_within,
    save,
    tiers_of,
    total_peak,
    twins,
)
from benchmarks.versus_checkpoint import checkpoint_blocks
from lowtide import policies
from lowtide.meter.resident import workspace_bytes

LAYERS = 4
ENOUGH = 0.05
"""The most that a step may take longer where the link suffices."""


def lengths_on(device: str) -> tuple[tuple[int, ...], int]:
    """Tokens of a step, and features."""
    return ((8192, 16384, 32768, 65536), 2048) if device == "cuda" else ((512, 1024), 256)


def planned_bytes(plan: lowtide.Plan, align: int) -> int:
    """The most bytes that the plan's moves have in their tier at once, each at a multiple of ``align``."""
    spans = [(m.born, max(m.gone, m.born + 1), -(-m.encoded_bytes // align) * align) for m in plan.moves]
    return max((sum(size for low, high, size in spans if low <= at < high) for at, _, _ in spans), default=0)


def rows_of(
    tokens: int, width: int, device: str, links: dict[str, Any], layers: int, seconds_each: float
) -> list[dict[str, Any]]:
    """One row a contender."""
    case = gpt(layers, width, batch=1, sequence=tokens)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tier = "host" if device == "cuda" else "disk"
    plain, moved, mixed, saved, rival = (model.to(device, dtype) for model in twins(case.build(), 5))
    batch = {name: value.to(device) for name, value in case.batch().items()}
    checkpoint_blocks(rival)
    pinned = device == "cuda"
    around: dict[str, tuple[torch.nn.Module, Callable[[], AbstractContextManager[Any]]]] = {
        "plain": (plain, nullcontext),
        "lowtide": (moved, nullcontext),
        "save_on_cpu": (saved, lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)),
        "per block": (rival, nullcontext),
        "mixed": (mixed, nullcontext),
    }
    handles = {"lowtide": lowtide.limit_memory(moved, policy=policies.offload(tier, links=links))}
    steps = {name: _step(model, batch, context, device) for name, (model, context) in around.items()}
    peaks: dict[str, int] = {}
    workspaces = 0
    for name, step in steps.items():
        if name == "mixed":  # what checkpointing takes, the workspaces that a limit counts included
            workspaces = workspace_bytes(torch.device(device))
            budget = peaks["per block"] + workspaces
            handles[name] = lowtide.limit_memory(mixed, budget, policy=policies.mixed(tier, links=links))
        for _ in range(UNSETTLED if name in handles else 3):
            step()
        peaks[name] = total_peak(around[name][0], batch, step)
    rounds = rounds_within(list(steps.values()), seconds_each, least=7 if seconds_each else 1)
    seconds = dict(zip(steps, paired(list(steps.values()), rounds), strict=True))
    base = statistics.median(seconds["plain"])
    steps["plain"]()
    exact = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    steps["plain"]()
    repeats = _same(exact, plain)  # fused attention's backward on a GPU may not, by itself
    rows = []
    for name in steps:
        row: dict[str, Any] = {
            "tokens": tokens,
            "contender": name,
            "peak_bytes": peaks[name],
            "seconds": statistics.median(seconds[name]),
            "extra": median_difference(seconds[name], seconds["plain"]) / base,
            "same_gradients": _same(exact, around[name][0]),
            "plain_repeats": repeats,
            "rounds": rounds,
        }
        if name in handles:
            row |= _as_planned(
                row, handles[name], base, peaks["plain"], workspace_bytes(torch.device(device))
            )
        rows.append(row)
        print(rows[-1], flush=True)
    return rows


def _as_planned(
    row: dict[str, Any], handle: Any, base: float, plain_peak: int, workspaces: int
) -> dict[str, Any]:
    """What a plan says of a contender's row, and whether the row holds.

    Args:
        row: its measurements.
        handle: of the limit.
        base: seconds of the plain step.
        plain_peak: of the plain step, in bytes.
        workspaces: bytes that are resident before the step, and that the plan counts.
    """
    latest = handle._limiter.book.latest
    assert latest is not None
    plan = latest.plan
    stores = tiers_of(handle)
    planned = planned_bytes(plan, stores[0].align) if stores else 0
    reserved = sum(store.counts.slab_bytes for store in stores)
    predicted, predicted_extra = plan.predicted_peak_bytes - workspaces, plan.predicted_extra_seconds / base
    suffices = predicted_extra <= ENOUGH
    near = abs(row["peak_bytes"] - predicted) <= 0.01 * min(predicted, plain_peak)
    exact = row["same_gradients"] or not row["plain_repeats"]
    return {
        "predicted_peak_bytes": predicted,
        "predicted_extra": predicted_extra,
        "link_suffices": suffices,
        "moved_bytes": sum(move.encoded_bytes for move in plan.moves),
        "replays": len(plan.replayed),
        "planned_tier_bytes": planned,
        "reserved_bytes": reserved,
        "holds": exact and near and reserved == planned and (row["extra"] <= ENOUGH or not suffices),
    }


def main(smoke: bool = False) -> None:
    """Run and write benchmarks/results/long_sequence_{device}.json; a smoke run is tiny and writes
    nothing.
    """
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pages = keep_pages()
    lengths, width = ((128,), 64) if smoke else lengths_on(device)
    layers = 2 if smoke else LAYERS
    links = lowtide.measure_links("host" if device == "cuda" else "disk", device=device)
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        rows += rows_of(tokens, width, device, links, layers, 0.0 if smoke else 40.0)
        if not smoke:
            save(f"long_sequence_{device}", rows, layers=layers, width=width, pages_kept=pages)


def _same(exact: list[torch.Tensor], model: torch.nn.Module) -> bool:
    """Whether the gradients of a model are these."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return len(found) == len(exact) and all(map(torch.equal, exact, found))


def _step(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    around: Callable[[], AbstractContextManager[Any]],
    device: str,
) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with around():
            loss = model(**batch).loss
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


if __name__ == "__main__":
    main(smoke="smoke" in sys.argv[1:])
